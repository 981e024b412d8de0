"""`keyhole bench decode` with two more systems, llama_cpp and llama_cpp_flash."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from benchmarks.llama_cpp import run
from keyhole.bench.settings import DecodeSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit status."""
    return command.main(
        "decode",
        DecodeSettings,
        run.run,
        module="benchmarks.llama_cpp",
        description=__doc__,
        argv=argv,
    )


if __name__ == "__main__":
    sys.exit(main())

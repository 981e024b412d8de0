"""`keyhole bench decode` with two more systems, llama_cpp and llama_cpp_flash."""

from __future__ import annotations

import functools
import sys

from benchmarks import command
from benchmarks.llama_cpp import run
from keyhole.bench.settings import DecodeSettings

#: Runs the benchmark with the given flags, or those of this process; returns its exit status.
main = functools.partial(
    command.main, "benchmarks.llama_cpp", DecodeSettings, run.run, about=__doc__, name="decode"
)


if __name__ == "__main__":
    sys.exit(main())

"""`keyhole bench decode` with two more systems, llama_cpp and llama_cpp_flash."""

from __future__ import annotations

import sys

from benchmarks.llama_cpp import run
from keyhole.bench.settings import DecodeSettings
from keyhole.cli import bench
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.parser import Parser
from keyhole.errors import KeyholeError

_PROGRAM = ("python", "-m", "benchmarks.llama_cpp")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns its exit status."""
    parser = Parser(prog=" ".join(_PROGRAM), description=__doc__)
    bench.add_common(parser)
    flags.add_settings(parser, DecodeSettings, "what is measured")
    try:
        arguments = parser.parse_args(argv)
        settings = DecodeSettings(**flags.settings_of(arguments, DecodeSettings))
        return bench.measured("decode", settings, arguments, run.run, command=_PROGRAM)
    except KeyholeError as error:
        terminal.error(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""Time and bandwidth of every operation on every backend, compared with plain PyTorch.

Results must agree before timing; timings are interleaved. Every run adds a line with its machine,
versions and settings to --output.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.kernels.settings import KernelSettings
from keyhole.bench.measure import Report
from keyhole.cli import bench
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.parser import Parser
from keyhole.config import bytes_text
from keyhole.errors import KeyholeError

_COLUMNS: bench.Columns = (
    ("operation", "op", str),
    ("on", "about", str),
    ("system", "system", str),
    ("time", "ms", bench.milliseconds),
    ("moved", "moved_bytes", bytes_text),
    ("GFLOP/s", "gflop_per_s", "{:.0f}".format),
    *bench.COMMON,
    ("of a copy's", "copy_share", "{:.0%}".format),
)
_PROGRAM = ("python", "-m", "benchmarks.kernels")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns its exit status."""
    parser = Parser(prog=" ".join(_PROGRAM), description=__doc__)
    bench.add_common(parser)
    flags.add_settings(parser, KernelSettings, "what is measured")
    try:
        arguments = parser.parse_args(argv)
        settings = KernelSettings(**flags.settings_of(arguments, KernelSettings))
        return bench.measured("kernels", settings, arguments, _run, (_COLUMNS, 3), _PROGRAM)
    except KeyholeError as error:
        terminal.error(str(error))
        return 2


def _run(settings: KernelSettings, report: Report) -> dict[str, Any]:
    from benchmarks.kernels import run  # after parsing the flags, as it imports torch

    return run.run(settings, report)


if __name__ == "__main__":
    sys.exit(main())

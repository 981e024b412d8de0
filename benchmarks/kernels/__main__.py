"""Time and bandwidth of every operation on every backend, compared with plain PyTorch.

Results must agree before timing; timings are interleaved. Every run adds a line with its machine,
versions and settings to --output.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from benchmarks import command
from benchmarks.kernels.settings import KernelSettings
from keyhole.bench.measure import Report
from keyhole.cli import bench
from keyhole.config import bytes_text

_COLUMNS: bench.Columns = (
    ("operation", "op", str),
    ("on", "about", str),
    ("system", "system", str),
    ("time", "ms", bench.milliseconds),
    ("moved", "moved_bytes", bytes_text),
    ("GFLOP/s", "gflop_per_s", "{:.0f}".format),
    *bench.COMMON,
    ("of a copy's", "copy_share", "{:.0%}".format),
    ("of a sum's", "sum_share", "{:.0%}".format),
)


def _run(settings: KernelSettings, report: Report) -> dict[str, Any]:
    from benchmarks.kernels import run  # after parsing the flags, as it imports torch

    return run.run(settings, report)


#: Runs the benchmark with the given flags, or those of this process; returns its exit status.
main = functools.partial(
    command.main, "benchmarks.kernels", KernelSettings, _run, about=__doc__, table=(_COLUMNS, 3)
)


if __name__ == "__main__":
    sys.exit(main())

"""What it costs to load keys and values of offloaded layers, on the bundled model.

Results of all ways of loading must agree before they are timed; timings are interleaved. With
--context a model with random weights is measured, too. Every run adds a line to --output.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from benchmarks import command
from benchmarks.offload.settings import OffloadSettings
from keyhole.bench.measure import Report
from keyhole.cli import bench
from keyhole.cli.common.terminal import Output, OutputKind, check_outputs
from keyhole.config import bytes_text

TRACE = OutputKind("a Chrome trace", {"": b'{\n  "schemaVersion"'})

_COLUMNS: bench.Columns = (
    ("policy", "policy", str),
    ("budget", "budget", str),
    ("system", "system", str),
    ("step", "step_ms", bench.milliseconds),
    ("time / resident", "ratio_to_resident", "{:.2f}".format),
    ("waiting", "stall_ms", bench.milliseconds),
    ("moved per step", "moved_bytes", bytes_text),
    ("hits", "hit_rate", "{:.1%}".format),
    ("repeated", "repeat_rate", "{:.1%}".format),
    ("right words", "right_share", "{:.1%}".format),
)


def _run(settings: OffloadSettings, report: Report) -> dict[str, Any]:
    check_outputs(Output("--trace", settings.trace, TRACE))
    from benchmarks.offload import run  # after parsing the flags, as it imports torch
    from keyhole.bench import measure
    from keyhole.models.loading import load

    model = load(settings.model, str(measure.device(settings.device)))
    return run.run(model, settings, report)


#: Runs the benchmark with the given flags, or those of this process; returns its exit status.
main = functools.partial(
    command.main, "benchmarks.offload", OffloadSettings, _run, about=__doc__, table=(_COLUMNS, 3)
)


if __name__ == "__main__":
    sys.exit(main())

"""Measures the papers' headline settings (`benchmarks.paper.settings`) on this machine.

    python -m benchmarks.headlines delta_figure_4 [--device cuda] [--note TEXT]
    python -m benchmarks.headlines --small

Each adds a line to benchmarks/results/headlines.jsonl. `--small` only checks that they run, with
tiny shapes: its measurements mean nothing, and it writes a line only with --output. Without names,
all settings are measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks import command
from benchmarks.paper import setting
from benchmarks.paper.settings import HEADLINES
from keyhole.bench import measure, model
from keyhole.cli import bench
from keyhole.cli.common import flags, terminal


def main() -> None:
    """Measures, prints and stores."""
    parser = command.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(HEADLINES))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:0")
    parser.add_argument("--small", action="store_true", help="tiny shapes; nothing is stored")
    parser.add_argument("--output", type=Path, help="add lines to this file instead")
    arguments = parser.parse_args()
    flags.quiet()
    output = arguments.output
    if output is None and not arguments.small:
        output = benchmarks.results() / "headlines.jsonl"
    for name in arguments.names or HEADLINES:
        line = _line(name, arguments)
        if output is not None:
            benchmarks.append(output, line)
        model.release_memory()  # the next setting needs it


def _line(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    print(f"{name}: {HEADLINES[name].about if name in HEADLINES else 'unknown'}", flush=True)
    device = measure.device(arguments.device)
    line = command.header("headline", "benchmarks.headlines", arguments.note, device)
    begin = time.monotonic()
    line |= setting.measured(name, str(device), _report, small=arguments.small)
    line["seconds"] = round(time.monotonic() - begin)
    rows = [[system, f"{speed:.4g}"] for system, speed in line["speeds"].items()]
    print(terminal.table(["system", line["unit"]], rows))
    bench.print_targets(line["bars"])
    return line


def _report(results: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
    """Prints the results so far."""
    for result in results:
        where = result.get("about") or f"{result['context']:,} tokens"
        spent = next(result[name] for name in ("step_ms", "ttft_ms", "ms") if name in result)
        print(f"  {where}, {result['system']}: {spent:.3f} ms", flush=True)
    for note in notes:
        print(f"  {note}", flush=True)


if __name__ == "__main__":
    main()

"""Command lines of the benchmarks: flags from settings, tables as results come, a stored line with
targets.
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from keyhole.bench import measure
from keyhole.bench.measure import Report
from keyhole.cli import bench
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.parser import Parser
from keyhole.errors import KeyholeError

_COMPARED = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "=": operator.eq}


def target(bar: str, value: float, wanted: float, sign: str = ">=") -> dict[str, Any]:
    """A target in a line of results: what it is about, the value, and what was wanted of it."""
    met = bool(_COMPARED[sign](value, wanted))
    return {"bar": bar, "value": value, "wanted": f"{sign} {wanted}", "met": met}


def parser(about: str | None, output: Path | None = None) -> argparse.ArgumentParser:
    """A parser with --note, and with --output if `output` is its default; about: a docstring."""
    made = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    made.add_argument("--note", default="", help="what a reader should know of this run")
    if output is not None:
        made.add_argument("--output", type=Path, default=output, help="file of JSON lines")
    return made


def header(
    benchmark: str, module: str, note: str, device: torch.device | None = None
) -> dict[str, Any]:
    """`measure.header` of `python -m MODULE`, which takes its flags from this process; by default
    on the CPU.
    """
    device = torch.device("cpu") if device is None else device
    return measure.header(benchmark, device, note, ("python", "-m", module))


def main(
    module: str,
    settings_class: type[Any],
    run: Callable[[Any, Report], dict[str, Any]],
    argv: Sequence[str] | None = None,
    *,
    about: str | None,
    name: str | None = None,
    table: bench.Table | None = None,
) -> int:
    """Runs `python -m MODULE` with these flags; returns its exit status.

    run: takes the settings and a function that prints results. argv: None for those of this
    process. about: the help text. name: of the benchmark, in its stored line; None: the last part
    of the module. table: as in `bench.measured`.
    """
    program = ("python", "-m", module)
    parser = Parser(prog=" ".join(program), description=about)
    bench.add_common(parser)
    flags.add_settings(parser, settings_class, "what is measured")
    try:
        arguments = parser.parse_args(argv)
        settings = settings_class(**flags.settings_of(arguments, settings_class))
        name = name or module.split(".")[-1]
        return bench.measured(name, settings, arguments, run, table, program)
    except KeyholeError as error:
        terminal.error(str(error))
        return 2

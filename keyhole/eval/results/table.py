"""The cells of an evaluation as a table for people: task x method x budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.eval.results.line_file import Line
from keyhole.eval.settings import FORCED
from keyhole.eval.tasks.common.names import task_name, told

Text = Callable[[Line], str]
NOT_EQUAL = "not at equal terms"


@dataclass(frozen=True)
class EvalTable:
    """Heads and rows, the first `left` columns being names; `common` is what all rows share."""

    common: str
    heads: list[str]
    rows: list[list[str]]
    left: int


def table(
    measured: Sequence[Line], refused: Sequence[Line], bytes_text: Callable[[float], str]
) -> EvalTable:
    """A row for each line, the refused ones last in their group of task, length and setup.

    A value that a cell does not have is "-".
    """
    return laid_out(
        grouped((*measured, *refused)),
        {
            "budget": of("budget", "{:,}".format),
            "score": _score,
            "written": of("tokens_generated", "{:.1f}".format),
            "keys read": of("read_share", "{:.1%}".format),
            "read per step": of("bytes_per_step", bytes_text),
            "step": of("step_ms", "{:.1f} ms".format),
            "peak cache": of("peak_bytes", bytes_text),
        },
    )


def grouped(lines: Iterable[Line]) -> list[Line]:
    """The lines in groups of task, length and setup, in the order in which these begin."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        name = f"{line['task']} {line['task_settings']} {line['length']} {line['setup']}"
        groups.setdefault(name, []).append(line)
    return [line for group in groups.values() for line in group]


def laid_out(lines: Sequence[Line], columns: Mapping[str, Text]) -> EvalTable:
    """A row for each line: what it is, and these columns; what all rows share stands above."""
    cells: dict[str, Text] = {
        "task": _task,
        "length": of("length", "{:,} tokens".format),
        "setup": of("setup", str),
        "samples": of("samples", str),
        "policy": of("method", str),
    }
    shared = []
    for name in ("length", "setup", "samples"):
        found = {cells[name](line) for line in lines}
        if len(found) == 1:
            shared.append(f"{name} {found.pop()}")
            del cells[name]
    left = len(cells)
    cells |= columns
    rows = [[text(line) for text in cells.values()] for line in lines]
    return EvalTable(", ".join(shared), list(cells), rows, left)


def of(name: str, text: Callable[[Any], str]) -> Text:
    """The text of a field; "-" where a line lacks it."""

    def cell(line: Line) -> str:
        value = line.get(name)
        return "-" if value is None else text(value)

    return cell


def _task(line: Line) -> str:
    """The name, and what was set of it: passkey:depth=0.5."""
    settings = () if line["task"] in FORCED else told(line["task"], line["task_settings"])
    return task_name(line["task"], settings)


def _score(line: Line) -> str:
    """Per cent; a perplexity as it is, less being better."""
    if "error" in line:
        return NOT_EQUAL if line.get("unequal") else "refused"
    if line["task"] == "perplexity":
        return f"ppl {line['perplexity']:.3f}"
    return f"{line['score']:.1%}"

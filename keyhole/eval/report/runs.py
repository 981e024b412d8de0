"""Where the numbers of the report come from: commands, machines, versions, settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keyhole.eval.report.plot_style import NOTHING
from keyhole.eval.results.cells import Cell, words


@dataclass(eq=False)
class Run:
    """Lines that one command gave on one machine with the same versions."""

    number: int
    command: str
    commit: str
    note: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    dates: list[str] = field(default_factory=list)
    lines: int = 0

    @property
    def when(self) -> str:
        """The first and the last date, to the minute, as they stand in the lines."""
        known = sorted(date[:16].replace("T", " ") for date in self.dates)
        if not known:
            return NOTHING
        first, last = known[0], known[-1]
        if first == last:
            return first
        return f"{first} to {last[11:] if first[:10] == last[:10] else last}"

    @property
    def where(self) -> str:
        """The machine in words; what `measure.machine` does not say comes last, by its name."""
        told = dict(self.machine)
        if told.get("device") == "cpu" and "cpu" in told:
            del told["device"]
        parts = [text.format(told.pop(key)) for key, text in _MACHINE.items() if key in told] + [
            f"{key} {value}" for key, value in told.items()
        ]
        return ", ".join(parts) or NOTHING


_MACHINE = {
    "device": "{}",
    "cpu": "{}",
    "cores": "cores: {}",
    "threads": "torch threads: {}",
    "memory_gib": "{} GiB of memory",
}


def runs(cells: Sequence[Cell]) -> tuple[list[Run], list[Run]]:
    """The runs, and the run of each cell. Load on the machine does not tell runs apart."""
    found: dict[str, Run] = {}
    of_cells = []
    for cell in cells:
        line = cell.line
        machine, versions = (_dictionary(line.get(key)) for key in ("machine", "versions"))
        machine.pop("load_average", None)
        command, commit, note = (words(line.get(key)) for key in ("command", "commit", "note"))
        new = Run(len(found) + 1, command, commit, note, machine, versions)
        said = [command, commit, note, machine, versions]
        run = found.setdefault(json.dumps(said, sort_keys=True, default=str), new)
        run.lines += 1
        if date := words(line.get("date")):
            run.dates.append(date)
        of_cells.append(run)
    return list(found.values()), of_cells


def settings(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """By name the settings that its cells had: "sink_size 4", or "full_layers [0] or [0, 1]"."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        own = found.setdefault(cell.name, {})
        for key, value in cell.settings.items():
            texts = own.setdefault(key, [])
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            if text not in texts:
                texts.append(text)
    return {
        name: [f"{key} {' or '.join(texts)}" for key, texts in own.items()]
        for name, own in found.items()
    }


def _dictionary(value: object) -> dict[str, Any]:
    """What a dictionary says; nothing of what is none."""
    found = value.items() if isinstance(value, dict) else ()
    return {key: said for key, said in found if said is not None}

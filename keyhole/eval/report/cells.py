"""The stored lines of `keyhole eval` for its report: a `Cell` for each line, and the runs.

A field of a line that is null, missing, or not a number where one is expected is None here;
pictures and tables leave it out. Of two lines that measure the same, the last one counts. A control
has no cell of its own; it is part of the cells that are compared with it. A `Run` is all lines that
one command wrote on one machine with the same versions.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keyhole.eval.comparisons import (
    ORACLE,
    RANDOM,
    RECENT,
    Comparison,
    compared,
    kv_dtype,
    wilson_of,
)
from keyhole.eval.line_file import GATE, QUESTIONS, Line
from keyhole.eval.methods import CONTROL, TERMS
from keyhole.eval.report.plot_style import NOTHING
from keyhole.eval.settings import FORCED
from keyhole.eval.tasks import ChangedSettings, changed_settings
from keyhole.registry import written

UNNAMED = "unnamed"
#: Settings that are shown in the column of the budget.
_BUDGETS = ("token_budget",)
_DEPTH = "depth"


@dataclass(frozen=True, order=True)
class EvalSetting:
    """A setting of the evaluation; cells of the same setting are compared with each other.

    settings: those of the task that differ from its defaults, as text. terms: the terms of the
    methods; "" for the user's own settings.
    """

    model: str
    task: str
    setup: str
    length: int
    settings: ChangedSettings = ()
    terms: str = ""
    kv_dtype: str = "auto"

    @property
    def needles(self) -> EvalSetting:
        """The setting without length and depth; all settings that share it are in one needle
        picture.
        """
        others = tuple(pair for pair in self.settings if pair[0] != _DEPTH)
        return dataclasses.replace(self, length=0, settings=others)

    @property
    def is_perplexity(self) -> bool:
        """Whether the score is 1 / perplexity, not a share of right answers."""
        return self.task == "perplexity"

    @property
    def depth(self) -> float | None:
        """The requested position of the needle, from 0 to 1."""
        text = dict(self.settings).get(_DEPTH, "")
        try:
            return number(float(text))
        except ValueError:
            return None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method with one budget at one place.

    name: the policy, with the settings that distinguish it from others of the same policy and
    budget. budget: tokens, None for full attention. scores, depths: one for each sample.
    """

    place: EvalSetting
    policy: str
    name: str
    settings: dict[str, Any]
    budget: int | None
    samples: int | None
    score: float | None
    scores: tuple[float | None, ...] = ()
    depths: tuple[float | None, ...] = ()
    perplexity: float | None = None
    tokens_prompt: float | None = None
    tokens_generated: float | None = None
    read_share: float | None = None
    bytes_per_step: float | None = None
    step_ms: float | None = None
    peak_bytes: float | None = None
    recall_per_layer: tuple[float | None, ...] = ()
    selection_maps: tuple[Line, ...] = ()
    comparison: Comparison | None = None
    line: Line = field(repr=False, default_factory=dict)

    @property
    def label(self) -> str:
        """The method and its budget: "delta, 256 tokens"."""
        return self.name if self.budget is None else f"{self.name}, {self.budget:,} tokens"

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval of the score; None unless every sample is right or wrong."""
        return wilson_of(self.scores)

    @property
    def recent(self) -> float | None:
        """Score of the recent control."""
        return self._control(RECENT)

    @property
    def random(self) -> float | None:
        """Score of the random control."""
        return self._control(RANDOM)

    @property
    def oracle(self) -> float | None:
        """Score of the oracle."""
        return self._control(ORACLE)

    @property
    def gain(self) -> float | None:
        """Points over the recent control, on the same samples."""
        gain = self.comparison and self.comparison.gain
        return gain.points if gain else None

    @property
    def distance(self) -> float | None:
        """Points below the oracle, on the same samples."""
        return self.comparison.distance if self.comparison else None

    @property
    def tells(self) -> bool:
        """Whether it may be ranked, which requires a recent control that is worse than full
        attention.
        """
        return self.comparison is None or self.comparison.can_tell is not False

    def _control(self, name: str) -> float | None:
        return self.comparison.controls.get(name) if self.comparison else None


def cells(lines: Iterable[Line]) -> list[Cell]:
    """A cell for each line, in order; later ones replace those that measure the same.

    Lines of controls, of the gate and of questions over documents are skipped.
    """
    every = [line for line in lines if line.get("benchmark") not in (GATE, QUESTIONS)]
    found = [
        dataclasses.replace(_cell(line), comparison=comparison)
        for line, comparison in zip(every, compared(every), strict=True)
        if line.get(CONTROL) is None
    ]
    telling = _telling_settings(found)
    named = [_named(cell, telling.get(cell.policy, ())) for cell in found]
    return list({(cell.place, cell.name, cell.budget): cell for cell in named}.values())


def places(found: Iterable[Cell]) -> dict[EvalSetting, list[Cell]]:
    """Cells by setting: tasks in the order of the lines, short texts before long ones."""
    by_place: dict[EvalSetting, list[Cell]] = {}
    for cell in found:
        by_place.setdefault(cell.place, []).append(cell)
    tasks = list(dict.fromkeys(dataclasses.replace(at, length=0) for at in by_place))
    order = sorted(
        by_place, key=lambda at: (tasks.index(dataclasses.replace(at, length=0)), at.length)
    )
    return {at: by_place[at] for at in order}


def place_name(at: EvalSetting, among: Iterable[EvalSetting]) -> str:
    """The part of a setting's name that distinguishes it from the others: "tiny_needle:depth=0.5,
    2,048 tokens".
    """
    others = list(among)
    of_task = {other.settings for other in others if other.task == at.task}
    shown = [
        pair
        for pair in at.settings
        if at.task not in FORCED or any(pair not in settings for settings in of_task)
    ]
    parts = [written(at.task, shown), *([f"{at.length:,} tokens"] if at.length else [])]
    if len({other.setup for other in others}) > 1:
        parts.append(SETUPS.get(at.setup, (at.setup,))[0])
    if len({other.terms for other in others}) > 1:
        parts.append(TERMS_NAMES.get(at.terms, at.terms))
    if len({other.kv_dtype for other in others}) > 1:
        parts.append(f"kv_dtype {at.kv_dtype}")
    if len({other.model for other in others}) > 1:
        parts.append(at.model)
    return ", ".join(parts)


#: Names of the terms, by the field of a line.
TERMS_NAMES = {
    "": "as given",
    "equal": "equal terms",
    "published": "as published",
    "tuned": "tuned",
}
#: Name and meaning of each setup: what is read densely before a sparse step.
SETUPS = {
    "prompt": ("question dense", "the whole prompt is read densely; only generation is sparse"),
    "question": (
        "question sparse",
        "the context is read densely; the question and what is generated are sparse",
    ),
}


def number(value: object) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def words(value: object) -> str:
    """The value if it is a string, else ""."""
    return value if isinstance(value, str) else ""


def _numbers(values: object) -> tuple[float | None, ...]:
    return tuple(map(number, values)) if isinstance(values, list | tuple) else ()


#: Fields of a cell that a line has under the same names.
_NUMBERS = "perplexity tokens_prompt tokens_generated read_share bytes_per_step step_ms".split()
_NUMBERS += ["peak_bytes"]


def _cell(line: Line) -> Cell:
    scores = _numbers(line.get("scores"))
    known = [score for score in scores if score is not None]
    score = number(line.get("score"))
    if score is None and known:
        score = sum(known) / len(known)
    policy = words(line.get("policy")) or UNNAMED
    settings, maps = line.get("settings"), line.get("selection_maps")
    task, asked = words(line.get("task")) or UNNAMED, line.get("task_settings")
    samples, budget = number(line.get("samples")), number(line.get("budget"))
    numbers: dict[str, Any] = {name: number(line.get(name)) for name in _NUMBERS}
    return Cell(
        place=EvalSetting(
            model=words(line.get("model")) or UNNAMED,
            task=task,
            setup=words(line.get("setup")),
            length=int(number(line.get("length")) or 0),
            settings=changed_settings(task, asked) if isinstance(asked, dict) else (),
            terms=words(line.get(TERMS)),
            kv_dtype=kv_dtype(line),
        ),
        policy=policy,
        name=policy,
        settings=settings if isinstance(settings, dict) else {},
        budget=None if budget is None else int(budget),
        samples=(len(scores) or None) if samples is None else int(samples),
        score=score,
        scores=scores,
        depths=_numbers(line.get("depths")),
        recall_per_layer=_numbers(line.get("recall_per_layer")),
        selection_maps=tuple(maps) if isinstance(maps, list) else (),
        line=line,
        **numbers,
    )


def _telling_settings(found: Sequence[Cell]) -> dict[str, list[str]]:
    """The settings, per policy, in which cells of the same place and budget differ."""
    groups: dict[object, list[Cell]] = {}
    for cell in found:
        groups.setdefault((cell.place, cell.policy, cell.budget), []).append(cell)
    telling: dict[str, list[str]] = {}
    for group in groups.values():
        for key in dict.fromkeys(key for cell in group for key in cell.settings):
            differ = len({json.dumps(cell.settings.get(key), default=str) for cell in group}) > 1
            known = telling.setdefault(group[0].policy, [])
            if differ and key not in (*known, *_BUDGETS):
                known.append(key)
    return telling


def _named(cell: Cell, telling: Sequence[str]) -> Cell:
    shown = [f"{key} {cell.settings[key]}" for key in telling if cell.settings.get(key) is not None]
    return dataclasses.replace(cell, name=", ".join([cell.policy, *shown]))


@dataclass(eq=False)
class Run:
    """Lines that one command wrote on one machine with the same versions."""

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
        """The dates of the first and the last line, to the minute."""
        known = sorted(date[:16].replace("T", " ") for date in self.dates)
        if not known:
            return NOTHING
        first, last = known[0], known[-1]
        if first == last:
            return first
        return f"{first} to {last[11:] if first[:10] == last[:10] else last}"

    @property
    def where(self) -> str:
        """The machine in words; unknown fields come last, by name."""
        rest = dict(self.machine)
        if rest.get("device") == "cpu" and "cpu" in rest:
            del rest["device"]
        parts = [text.format(rest.pop(key)) for key, text in _MACHINE.items() if key in rest] + [
            f"{key} {value}" for key, value in rest.items()
        ]
        return ", ".join(parts) or NOTHING


_MACHINE = {
    "device": "{}",
    "cpu": "{}",
    "cores": "cores: {}",
    "threads": "torch threads: {}",
    "memory_gib": "{} GiB of memory",
}


def runs_of(lines: Sequence[Line]) -> tuple[list[Run], list[Run]]:
    """The runs, and the run of each line. The load of the machine may differ within a run."""
    found: dict[str, Run] = {}
    of_lines = []
    for line in lines:
        machine, versions = (_dictionary(line.get(key)) for key in ("machine", "versions"))
        machine.pop("load_average", None)
        command, commit, note = (words(line.get(key)) for key in ("command", "commit", "note"))
        new = Run(len(found) + 1, command, commit, note, machine, versions)
        identity = [command, commit, note, machine, versions]
        run = found.setdefault(json.dumps(identity, sort_keys=True, default=str), new)
        run.lines += 1
        if date := words(line.get("date")):
            run.dates.append(date)
        of_lines.append(run)
    return list(found.values()), of_lines


def settings_by_name(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """The settings of the cells of each name: "sink_size 4", or "full_layers [0] or [0, 1]"."""
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
    """The items of a dictionary that are not None; {} for other values."""
    found = value.items() if isinstance(value, dict) else ()
    return {key: value for key, value in found if value is not None}

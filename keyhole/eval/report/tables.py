"""The tables of the report: cells as text, the best of each column, and the run of each row.

This module knows no HTML; `page.html` renders its tables.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.eval.comparisons import note, p_text
from keyhole.eval.report.cells import SETUPS, Cell, EvalSetting, Run, place_name, places
from keyhole.eval.report.plot_style import NOTHING, MethodStyle, Styles, size_scale


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of numbers. best: `max`, `min`, or None where neither is better.

    text: how a number is written. is_size: bytes, which get one unit for the whole column.
    """

    key: str
    head: str
    unit: str
    meaning: str
    text: Callable[[float], str] = str
    is_size: bool = False
    best: Callable[[Iterable[float]], float] | None = None


def _read(form: str = "{}", factor: int = 1, best: str = "", **fields: Any) -> Column:
    """A column of `columns.toml`."""
    ends = {"max": max, "min": min}
    return Column(text=lambda value: form.format(factor * value), best=ends.get(best), **fields)


_COLUMNS = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
SCORE, PERPLEXITY, RECENT, RANDOM, ORACLE, GAIN, *_ = COLUMNS = [
    _read(**fields) for fields in _COLUMNS["column"]
]


#: Columns in which methods are ranked.
_RANKED = (SCORE, GAIN)


@dataclass(frozen=True, kw_only=True)
class Value:
    """A cell of a table: its text, the number it is sorted by, and whether it is the best.

    tint: a score from 0 to 1, which determines the colour. beside: small text after it. tells:
    whether it may be ranked.
    """

    text: str
    sort: float | None
    tint: float | None = None
    best: bool = False
    low_high: tuple[float, float] | None = None
    beside: str = ""
    tells: bool = True


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """A method with a budget; run: the number of its run. note: a remark on it."""

    name: str
    look: MethodStyle
    budget: Value
    samples: int | None
    values: tuple[Value, ...]
    run: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """The results at one place."""

    title: str
    about: str
    columns: tuple[Column, ...]
    rows: tuple[ReportRow, ...]

    @property
    def has_notes(self) -> bool:
        """Whether any row has a note."""
        return any(row.note for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Scores of each method and budget (row) at each place (column), and their mean.

    columns: the parts of each column's head.
    """

    columns: tuple[list[str], ...]
    rows: tuple[ReportRow, ...]


def tables(cells: Sequence[Cell], style: Styles, run_of: Sequence[Run]) -> list[ReportTable]:
    """A table for each place; run_of: the run of each cell."""
    numbers = {id(cell): run.number for cell, run in zip(cells, run_of, strict=True)}
    by_place = places(cells)
    found = []
    for at, own in by_place.items():
        columns = _columns(at, own)
        by_column = [_values([_of(cell, c) for cell in own], c, own) for c in columns]
        rows = tuple(
            ReportRow(
                name=cell.name,
                look=style[cell.name],
                budget=_budget(cell),
                samples=cell.samples,
                values=tuple(values[index] for values in by_column),
                run=numbers[id(cell)],
                note=note(cell.line, cell.comparison),
            )
            for index, cell in enumerate(own)
        )
        found.append(
            ReportTable(
                title=place_name(at, by_place), about=_about(at, own), columns=columns, rows=rows
            )
        )
    return found


def overview(cells: Sequence[Cell], style: Styles, shown: Column = SCORE) -> Overview:
    """All scores, or gains; a mean is shown for rows with several values, if none is missing.

    Perplexities are shown but not averaged; a row with a score that cannot be ranked has no mean.
    """
    by_place = places(cells)
    rows = list(dict.fromkeys((cell.name, cell.budget) for cell in cells))
    scores = {(cell.place, cell.name, cell.budget): cell for cell in cells}
    by_column: list[list[Value]] = []
    averaged: list[list[Value]] = []
    for at in by_place:
        own = [scores.get((at, *row)) for row in rows]
        column = PERPLEXITY if at.is_perplexity and shown is SCORE else shown
        values = [None if cell is None else _of(cell, column) for cell in own]
        by_column.append(_values(values, column, own))
        averaged += [] if at.is_perplexity and shown is SCORE else by_column[-1:]
    heads = [place_name(at, by_place).split(", ") for at in by_place]
    if len(averaged) > 1:
        means = [_mean([values[index] for values in averaged]) for index in range(len(rows))]
        by_column.append(_values(means, shown))
        heads.append(["mean"])
    return Overview(
        columns=tuple(heads),
        rows=tuple(
            ReportRow(
                name=name,
                look=style[name],
                budget=_budget(next(c for c in cells if (c.name, c.budget) == (name, budget))),
                samples=None,
                values=tuple(values[index] for values in by_column),
                run=0,
            )
            for index, (name, budget) in enumerate(rows)
        ),
    )


def _columns(at: EvalSetting, cells: Sequence[Cell]) -> tuple[Column, ...]:
    """The columns that have values, with a suitable unit for sizes."""
    found = []
    for column in COLUMNS[at.is_perplexity :]:
        known = [value for cell in cells if (value := _of(cell, column)) is not None]
        if known and column.is_size:
            unit, text = size_scale(known)
            column = dataclasses.replace(column, unit=unit, text=text)
        if known:
            found.append(column)
    return tuple(found)


def _of(cell: Cell, column: Column) -> float | None:
    value: float | None = getattr(cell, column.key)
    return value


def _values(
    numbers: Sequence[float | None], column: Column, cells: Sequence[Cell | None] = ()
) -> list[Value]:
    """The values of a column; the best is marked, unless more than half of them round to the same
    number.
    """
    texts = [NOTHING if value is None else column.text(value) for value in numbers]
    tell = [cell is None or cell.tells for cell in cells or [None] * len(texts)]
    known = [
        value for value, tells in zip(numbers, tell, strict=True) if tells and value is not None
    ]
    best = column.text(column.best(known)) if known and column.best else None
    if 2 * texts.count(str(best)) > len(known):
        best = None
    intervals = [cell.interval if cell and column is SCORE else None for cell in cells]
    return [
        Value(
            text=text,
            sort=value,
            tint=value if column is SCORE else None,
            best=tells and text == best,
            low_high=interval,
            beside=_beside(cell, column),
            tells=tells or column not in _RANKED,
        )
        for text, value, interval, tells, cell in zip(
            texts,
            numbers,
            intervals or [None] * len(texts),
            tell,
            cells or [None] * len(texts),
            strict=True,
        )
    ]


def _beside(cell: Cell | None, column: Column) -> str:
    """The interval and the test of a gain."""
    gain = cell.comparison.gain if cell and cell.comparison and column is GAIN else None
    if gain is None:
        return ""
    return f"{100 * gain.low:.0f} to {100 * gain.high:.0f}, p {p_text(gain)}"


def _budget(cell: Cell) -> Value:
    """Tokens, or "all" for a method without a budget, which sorts as the largest."""
    if cell.budget is None:
        return Value(text="all", sort=float(2**62))
    return Value(text=f"{cell.budget:,}", sort=float(cell.budget))


def _about(at: EvalSetting, cells: Sequence[Cell]) -> str:
    """The number and length of samples, and what was sparse."""
    samples = sorted({cell.samples for cell in cells if cell.samples})
    prompts = [cell.tokens_prompt for cell in cells if cell.tokens_prompt is not None]
    parts = [f"{' or '.join(map(str, samples))} samples"] if samples else []
    if prompts:
        parts.append(f"mean prompt {sum(prompts) / len(prompts):,.0f} tokens")
    if at.setup:
        parts.append(SETUPS.get(at.setup, (f"setup {at.setup}",))[0])
    return "; ".join(parts)


def _mean(values: Sequence[Value]) -> float | None:
    known = [value.sort for value in values if value.sort is not None and value.tells]
    return sum(known) / len(known) if known and len(known) == len(values) else None

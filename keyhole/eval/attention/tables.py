"""The suite's stored lines as tables: error of the output, mass kept, layers, overlap.

Means are over sparse layers and steps, intervals over texts: each text is one observation, because
its steps and layers are not independent. A policy is compared with its controls text by text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keyhole.eval import comparisons
from keyhole.eval.attention.suite import LOSS, METHOD, OVERLAP, RANDOM, TRAINED
from keyhole.eval.line_file import EvalTable, Line

#: A policy that reads more than this, relative to its control, cannot be compared with it.
_MORE = 1.02


class Estimate(NamedTuple):
    """A mean over texts, and half the width of its 95 % interval; None for a single text."""

    mean: float
    half: float | None

    @property
    def low(self) -> float:
        """The lower end; minus infinity with a single text."""
        return -math.inf if self.half is None else self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end; infinity with a single text."""
        return math.inf if self.half is None else self.mean + self.half


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """A policy at one length and budget on one kind of weights, over its sparse layers.

    mass, error: of the policy (METHOD) and of each control. read: tokens read by each of them.
    gain: the share of the recent control's error that the policy avoids; None without a control, or
    if it reads more. way: its place between its recent control (0) and the oracle (1); None where
    the oracle is no better than the control. repeats: share of a selection that the next step
    selects, too.
    """

    line: Line
    mass: dict[str, Estimate]
    error: dict[str, Estimate]
    read: dict[str, float]
    gain: Estimate | None
    way: Estimate | None
    repeats: float | None

    @property
    def name(self) -> str:
        """The name as the user wrote it."""
        return str(self.line["method"])

    @property
    def dense_layers(self) -> list[int]:
        """Layers that read everything."""
        return list(self.line["dense_layers"])

    @property
    def reads_more(self) -> bool:
        """Whether it reads more than its controls do."""
        return "recent" in self.read and self.read[METHOD] > _MORE * self.read["recent"]


@dataclass(frozen=True, kw_only=True)
class AttentionSetting:
    """Rows that can be compared with each other, by method and kind of weights.

    overlaps: the line of the top lists, by kind of weights.
    """

    model: str
    texts: str
    length: int
    budget: int | None
    terms: str
    rows: dict[tuple[str, str], SummaryRow] = field(default_factory=dict)
    overlaps: dict[str, Line] = field(default_factory=dict)

    @property
    def methods(self) -> list[str]:
        """The methods in order."""
        return list(dict.fromkeys(name for name, _ in self.rows))

    def row(self, method: str, weights: str = TRAINED) -> SummaryRow | None:
        """The row of a method, if it was measured."""
        return self.rows.get((method, weights))

    @property
    def measured(self) -> dict[str, tuple[SummaryRow, SummaryRow | None]]:
        """The row of each method, and that of its random twin, if it was measured."""
        found = ((name, self.row(name), self.row(name, RANDOM)) for name in self.methods)
        return {name: (row, twin) for name, row, twin in found if row is not None}


def places(lines: Iterable[Line]) -> list[AttentionSetting]:
    """The lines grouped into comparable settings; of two lines that measure the same, the last one
    counts.

    Overlaps belong to every setting of their length and budget.
    """
    known = list(lines)
    found: dict[tuple[Any, ...], AttentionSetting] = {}
    for line in known:
        if line["measured"] == LOSS:
            key = _key(line)
            place = found.setdefault(
                (*key, line["terms"]),
                AttentionSetting(**dict(zip(_KEY, key, strict=True)), terms=line["terms"]),
            )
            place.rows[line["method"], line["weights"]] = row(line)
    for line in known:
        if line["measured"] == OVERLAP:
            for known_by, place in found.items():
                if known_by[:-1] == _key(line):
                    place.overlaps[line["weights"]] = line
    return list(found.values())


def row(line: Line) -> SummaryRow:
    """The means of one line over the layers that its policy does not read densely."""
    sparse = [i for i, layer in enumerate(line["layers"]) if layer not in line["dense_layers"]]
    losses = line["losses"]

    def texts(who: str, what: str) -> list[float]:
        rows = losses[who][what]
        return [statistics.fmean(one[i] for i in sparse) for one in rows]

    if not sparse:
        nothing = {METHOD: Estimate(0.0, 0.0)}
        everything = {METHOD: Estimate(1.0, 0.0)}
        return SummaryRow(
            line=line,
            mass=everything,
            error=nothing,
            read={},
            gain=None,
            way=None,
            repeats=None,
        )
    error = {who: texts(who, "error") for who in losses}
    read = {who: statistics.fmean(texts(who, "read")) for who in losses}
    comparable = "recent" in error and read[METHOD] <= _MORE * read["recent"]
    again = [one[0] for one in line["repeats"] if one[0] is not None]
    return SummaryRow(
        line=line,
        mass={who: estimate(texts(who, "mass")) for who in losses},
        error={who: estimate(values) for who, values in error.items()},
        read=read,
        gain=_gain(error) if comparable else None,
        way=_way(error) if comparable else None,
        repeats=statistics.fmean(again) if again else None,
    )


def estimate(values: Sequence[float]) -> Estimate:
    """The mean and Student's 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, None)
    error = statistics.stdev(values) / math.sqrt(len(values))
    quantile = float(comparisons.require_scipy().t.ppf(0.975, len(values) - 1))
    return Estimate(mean, quantile * error)


def curve(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean over texts at each position, None where no text has a value."""
    found: list[float | None] = []
    for column in zip(*rows, strict=True):
        there = [value for value in column if value is not None]
        found.append(statistics.fmean(there) if there else None)
    return found


_KEY = ("model", "texts", "length", "budget")


def _key(line: Line) -> tuple[Any, ...]:
    return tuple(line[name] for name in _KEY)


def _gain(error: dict[str, list[float]]) -> Estimate | None:
    """None where the control reads everything, and so has no error."""
    if not all(error["recent"]):
        return None
    pairs = zip(error[METHOD], error["recent"], strict=True)
    return estimate([1 - own / recent for own, recent in pairs])


def _way(error: dict[str, list[float]]) -> Estimate | None:
    rows = list(zip(error[METHOD], error["recent"], error["oracle"], strict=True))
    if any(recent <= best for _, recent, best in rows):
        return None
    return estimate([(recent - own) / (recent - best) for own, recent, best in rows])


NOTHING = "-"
#: Steps that the table of overlaps shows; the pictures show all.
_STEPS = (1, 8, 64)
_NAMES = {
    "pages": "pages, one list",
    "head_pages": "pages per KV head",
    "head_tokens": "tokens per KV head",
}
HOW_TO_READ = (
    "gain: the share of the recent control's error that the method avoids (same dense "
    "layers, sinks and budget, newest tokens elsewhere), with a 95 % interval over texts. better, "
    "worse: the interval excludes 0. twin too: so does the interval with random weights, which "
    "have learnt nothing, so the gain is no result. way: the method's place between that control "
    "and the oracle."
)


def tables(place: AttentionSetting) -> list[EvalTable]:
    """All tables of one length, budget and terms."""
    found = [_errors(place), _masses(place), _layers(place), _overlaps(place)]
    return [table for table in found if table.rows]


def title(place: AttentionSetting) -> str:
    """The title of all tables of a setting."""
    budget = "no budget" if place.budget is None else f"budget {place.budget:,}"
    parts = [f"{place.length:,} tokens", budget, f"terms {place.terms}", place.texts]
    return ", ".join(part for part in parts if part)


def verdict(row: SummaryRow, twin: SummaryRow | None = None) -> str:
    """What the interval of the gain shows; twin: the same method with random weights."""
    if row.reads_more:
        return "reads more"
    if row.gain is None:
        return NOTHING
    if row.gain.mean == 0 and row.gain.half in (0, None):
        return "no selection"
    if row.gain.low > 0:
        as_well = twin is not None and twin.gain is not None and twin.gain.low > 0
        return "better, twin too" if as_well else "better"
    return "worse" if row.gain.high < 0 else "undecided"


def _errors(place: AttentionSetting) -> EvalTable:
    heads = ["method", "dense layers", "read", "error", "recent", "random", "oracle", "gain"]
    heads += ["verdict", "way", "random weights: error", "recent", "gain"]
    rows = []
    for name, (row, twin) in place.measured.items():
        layers = ",".join(map(str, row.dense_layers)) or "none"
        read = f"{row.read[METHOD]:,.0f}" if row.read else "all"
        own = [_number(row.error.get(who)) for who in (METHOD, "recent", "random", "oracle")]
        way = NOTHING if row.way is None else f"{row.way.mean:.0%}"
        beside = [NOTHING] * 3
        if twin is not None:
            beside = [_number(twin.error.get(who)) for who in (METHOD, "recent")]
            beside.append(_signed(twin.gain))
        rows.append([name, layers, read, *own, _signed(row.gain), verdict(row, twin), way, *beside])
    return EvalTable(
        title="Relative error of the attention output, mean over the layers that are not dense",
        heads=heads,
        rows=rows,
        left=2,
    )


def _masses(place: AttentionSetting) -> EvalTable:
    heads = ["method", "mass kept", "recent", "random", "oracle", "selected again next step"]
    heads += ["random weights: mass kept", "oracle"]
    rows = []
    for name, (row, twin) in place.measured.items():
        own = [_percent(row.mass.get(who)) for who in (METHOD, "recent", "random", "oracle")]
        again = NOTHING if row.repeats is None else f"{row.repeats:.0%}"
        beside = [NOTHING] * 2
        if twin is not None:
            beside = [_percent(twin.mass.get(who)) for who in (METHOD, "oracle")]
        rows.append([name, *own, again, *beside])
    return EvalTable(
        title="Attention mass kept, mean over the layers that are not dense",
        heads=heads,
        rows=rows,
        left=1,
    )


def _layers(place: AttentionSetting) -> EvalTable:
    """One row per layer, one column per method: its error and that of its recent control."""
    there = {name: row for name, (row, _) in place.measured.items()}
    layers: list[int] = next(iter(there.values())).line["layers"] if there else []
    rows = [
        [str(layer), *(_layer(row.line, number) for row in there.values())]
        for number, layer in enumerate(layers)
    ]
    return EvalTable(
        title="Error by layer: the method's / its recent control's",
        heads=["layer", *there],
        rows=rows,
        left=1,
    )


def _layer(line: Line, number: int) -> str:
    if line["layers"][number] in line["dense_layers"]:
        return "dense"
    shown = []
    for who in (METHOD, "recent"):
        rows = line["losses"].get(who, {}).get("error", [])
        shown += [f"{sum(one[number] for one in rows) / len(rows):.2f}"] if rows else []
    return " / ".join(shown)


def _overlaps(place: AttentionSetting) -> EvalTable:
    lines = [(weights, place.overlaps.get(weights)) for weights in (TRAINED, RANDOM)]
    depth = max((len(line["layers"]) for _, line in lines if line), default=0)
    distances = [d for d in dict.fromkeys((1, 2, depth // 2, depth - 1)) if 0 < d < depth]
    heads = ["lists", "weights", *(f"layers {d} apart" for d in distances)]
    heads += [f"{n} step{'s' if n > 1 else ''} later" for n in _STEPS]
    heads += ["in first and newest", "chance"]
    rows = []
    for kind, name in _NAMES.items():
        for weights, line in lines:
            if line is None or kind not in line["lists"]:
                continue
            found = line["lists"][kind]
            far, later = curve(found["by_distance"]), curve(found["by_steps"])
            cells = [*(far[d - 1] for d in distances), *(later[n - 1] for n in _STEPS)]
            newest = sum(found["newest"]) / len(found["newest"])
            shown = [NOTHING if x is None else f"{x:.0%}" for x in (*cells, newest)]
            rows.append([name, weights, *shown, f"{found['chance']:.0%}"])
    return EvalTable(
        title="Overlap of the entries of largest attention, under full attention",
        heads=heads,
        rows=rows,
        left=2,
    )


def _number(found: Estimate | None) -> str:
    return NOTHING if found is None else f"{found.mean:.3f}"


def _percent(found: Estimate | None) -> str:
    return NOTHING if found is None else f"{found.mean:.0%}"


def _signed(found: Estimate | None) -> str:
    if found is None:
        return NOTHING
    width = "" if found.half is None else f" ± {100 * found.half:.1f}"
    return f"{100 * found.mean:+.1f}{width} %"

"""The stored lines as tables for people: error of the output, mass kept, layers, overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keyhole.eval.attention.cells import METHOD
from keyhole.eval.attention.report.summary import (
    RANDOM,
    TRAINED,
    AttentionSetting,
    Estimate,
    SummaryRow,
    curve,
)
from keyhole.eval.results.line_file import Line

NOTHING = "-"
#: Steps and distances that the table of overlaps shows; the pictures show all.
_STEPS = (1, 8, 64)
_NAMES = {
    "pages": "pages, one list",
    "head_pages": "pages per KV head",
    "head_tokens": "tokens per KV head",
}
HOW_TO_READ = (
    "gain: the share of the recent control's error that the method does without (same dense "
    "layers, sinks and budget, newest tokens elsewhere), with a 95 % interval over texts. better, "
    "worse: the interval leaves out 0. twin too: so it does with random weights, where nothing was "
    "learnt, and the gain is no result. way: how far the method comes from that control to the "
    "oracle."
)


@dataclass(frozen=True, kw_only=True)
class AttentionTable:
    """A title, heads and rows, the first `left` columns being names."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    left: int


def tables(place: AttentionSetting) -> list[AttentionTable]:
    """All tables of one length, budget and terms."""
    found = [_errors(place), _masses(place), _layers(place), _overlaps(place)]
    return [table for table in found if table.rows]


def title(place: AttentionSetting) -> str:
    """What all tables of a place have in common."""
    budget = "no budget" if place.budget is None else f"budget {place.budget:,}"
    parts = [f"{place.length:,} tokens", budget, f"terms {place.terms}", place.texts]
    return ", ".join(part for part in parts if part)


def verdict(row: SummaryRow, twin: SummaryRow | None = None) -> str:
    """What the interval of the gain says; twin: the same method with random weights."""
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


def _errors(place: AttentionSetting) -> AttentionTable:
    heads = ["method", "dense layers", "read", "error", "recent", "random", "oracle", "gain"]
    heads += ["verdict", "way", "random weights: error", "recent", "gain"]
    rows = []
    for name in place.methods:
        row, twin = place.row(name), place.row(name, RANDOM)
        if row is None:
            continue
        layers = ",".join(map(str, row.dense_layers)) or "none"
        read = f"{row.read[METHOD]:,.0f}" if row.read else "all"
        own = [_number(row.error.get(who)) for who in (METHOD, "recent", "random", "oracle")]
        way = NOTHING if row.way is None else f"{row.way.mean:.0%}"
        beside = [NOTHING] * 3
        if twin is not None:
            beside = [_number(twin.error.get(who)) for who in (METHOD, "recent")]
            beside.append(_signed(twin.gain))
        rows.append([name, layers, read, *own, _signed(row.gain), verdict(row, twin), way, *beside])
    return AttentionTable(
        title="Relative error of the attention output, mean over the layers that are not dense",
        heads=heads,
        rows=rows,
        left=2,
    )


def _masses(place: AttentionSetting) -> AttentionTable:
    heads = ["method", "mass kept", "recent", "random", "oracle", "selected again next step"]
    heads += ["random weights: mass kept", "oracle"]
    rows = []
    for name in place.methods:
        row, twin = place.row(name), place.row(name, RANDOM)
        if row is None:
            continue
        own = [_percent(row.mass.get(who)) for who in (METHOD, "recent", "random", "oracle")]
        again = NOTHING if row.repeats is None else f"{row.repeats:.0%}"
        beside = [NOTHING] * 2
        if twin is not None:
            beside = [_percent(twin.mass.get(who)) for who in (METHOD, "oracle")]
        rows.append([name, *own, again, *beside])
    return AttentionTable(
        title="Attention mass kept, mean over the layers that are not dense",
        heads=heads,
        rows=rows,
        left=1,
    )


def _layers(place: AttentionSetting) -> AttentionTable:
    """A row per layer, a column per method: its error, and that of its recent control."""
    rows_of = {name: place.row(name) for name in place.methods}
    there = {name: row for name, row in rows_of.items() if row is not None}
    layers: list[int] = next(iter(there.values())).line["layers"] if there else []
    rows = [
        [str(layer), *(_layer(row.line, number) for row in there.values())]
        for number, layer in enumerate(layers)
    ]
    return AttentionTable(
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


def _overlaps(place: AttentionSetting) -> AttentionTable:
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
    return AttentionTable(
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


def markdown(table: AttentionTable) -> str:
    """The table as GitHub shows it."""
    ends = [":--" if i < table.left else "--:" for i in range(len(table.heads))]
    rows: Sequence[Sequence[str]] = [table.heads, ends, *table.rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)

"""The measurements and the figure of docs/samkv.md (needs matplotlib).

Written by `python -m benchmarks.samkv --render` from the stored lines, between two comments.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import read_lines
from benchmarks.document_reuse.methods import ABLATION, METHODS
from benchmarks.results_page.text import between, written
from keyhole import drawing
from keyhole.drawing import FAINT, INK

Line = dict[str, Any]
#: Lines, by kind of question and shape.
Lines = dict[tuple[str, str], Line]

BEGIN, END = "<!-- results: python -m benchmarks.samkv --render -->\n", "<!-- end of results -->"
PAGE, PICTURE = "samkv.md", "samkv.png"

_HEADS = {
    "one/ends": "one, ends",
    "one/middle": "one, middle",
    "two_hop/ends": "two hops, ends",
    "two_hop/middle": "two hops, middle",
    "needs_each_other/ends": "each other, ends",
    "needs_each_other/middle": "each other, middle",
}
_COSTS = ("kept", "computed", "first token", "read")
_COLORS = {"recompute": INK, "reuse": "#4c8c4a", "epic": "#0b6e75", "cacheblend": "#7a5ea8"}
_SAM_KV, _OTHER = "#b03a48", "#e08e4f"


def stored(path: Path) -> Lines:
    """Each cell as one line: the newest complete measurement and the methods added to it since.

    A later line with the same questions and blocks adds its methods, and replaces those of the
    same name. Each result gets `reference_ms`, the time to first token of `recompute` in its own
    line; the cell gets `added`, the lines that were added to it.
    """
    found: Lines = {}
    for line in read_lines(path):
        key = line["kind"], line["shape"]
        found[key] = _joined(found.get(key), line)
    return found


def _joined(before: Line | None, line: Line) -> Line:
    (reference,) = (r["ttft_ms"] for r in line["results"] if r["method"] == "recompute")
    results = [r | {"reference_ms": reference} for r in line["results"]]
    line = line | {"results": results, "added": []}
    if before is None or any(before[name] != line[name] for name in ("items", "block_size")):
        return line
    names = {r["method"] for r in results}
    if names >= {r["method"] for r in before["results"]}:
        return line
    # `recompute` is not replaced: later lines have it only as the reference.
    names.discard("recompute")
    kept = [r for r in before["results"] if r["method"] not in names]
    new = [r for r in results if r["method"] in names]
    return before | {"results": kept + new, "added": [*before["added"], line]}


def cell(line: Line) -> str:
    """A summary of one cell, printed during the measurement."""
    rows = [
        f"  {r['method']:34} {r['exact']:6.1%} f1 {r['f1']:.3f} kept {r['sequence_ratio']:.3f} "
        f"computed {r['recompute_ratio']:.3f} first token {r['ttft_ms']:.0f} ms "
        f"read {r['bytes_read'] / 1e6:.2f} MB"
        for r in line["results"]
    ]
    return "\n".join([f"{line['kind']} {line['shape']}, {line['items']} questions", *rows])


def write(lines: Lines, docs: Path) -> None:
    """Rewrites the tables and the figure of the page."""
    page = docs / PAGE
    page.write_text(between(page.read_text(), BEGIN, END, render(lines)))
    if lines:
        picture(lines, docs / "images" / PICTURE)


def render(lines: Lines) -> str:
    """All tables: one per shape, then the ablation of SamKV."""
    parts = []
    for shape in _shapes(lines):
        number, words = shape.split("x")
        found = {kind: line for (kind, at), line in lines.items() if at == shape}
        parts += [f"### {number} documents of {words} words", _table(found, list(METHODS))]
        if any(r["method"] in ABLATION for line in found.values() for r in line["results"]):
            names = [*ABLATION, "sam_kv overwrite", "sam_kv fusion"]
            parts += ["SamKV's switches (the last two rows have all of them on):"]
            parts += [_table(found, names)]
        parts.append(_about(list(found.values())))
    return "\n\n".join(parts) + "\n"


def _table(found: dict[str, Line], names: Sequence[str]) -> str:
    """Right answers per kind, and costs as means over the kinds."""
    kinds = [kind for kind in _HEADS if kind in found]
    heads, rows = ["method", *(_HEADS[kind] for kind in kinds), *_COSTS], []
    by_kind = {kind: {r["method"]: r for r in found[kind]["results"]} for kind in kinds}
    for name in names:
        results = [by_kind[kind].get(name) for kind in kinds]
        if not any(results):
            continue
        cells = ["" if r is None else f"{100 * r['exact']:.0f}" for r in results]
        rows.append([name, *cells, *_costs(by_kind, kinds, name)])
    return written(heads, rows)


def _costs(by_kind: dict[str, dict[str, Line]], kinds: list[str], name: str) -> list[str]:
    there = [kind for kind in kinds if name in by_kind[kind]]
    own = [by_kind[kind][name] for kind in there]

    def mean(field: str) -> float:
        return float(sum(r[field] for r in own) / len(own))

    return [
        f"{mean('sequence_ratio'):.0%}",
        f"{mean('recompute_ratio'):.0%}",
        f"{_times(own):.2f}",
        f"{mean('bytes_read') / 1e6:.1f} MB",
    ]


def _times(results: list[Line]) -> float:
    """Time to first token relative to `recompute` in the same lines."""
    return float(sum(r["ttft_ms"] for r in results) / sum(r["reference_ms"] for r in results))


def picture(lines: Lines, path: Path) -> None:
    """Writes a PNG: right answers against time to first token.

    A panel per shape and position of the needed sentences, where this combination was measured.
    """
    panels = [
        (shape, place, own)
        for shape in _shapes(lines)
        for place in ("ends", "middle")
        if (own := [line for (kind, at), line in lines.items()
                    if at == shape and kind.endswith(f"/{place}")])
    ]  # fmt: skip
    size, date = (max(4.2, 2.1 * len(panels) + 0.6), 3.5), max(x["date"] for x in lines.values())
    with drawing.picture(path, date=date, figsize=size, layout="constrained") as figure:
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
        for axis, (shape, place, own) in zip(axes[0], panels, strict=True):
            _panel(axis, own)
            number, words = shape.split("x")
            axis.set_title(f"{number} documents of {words},\nneeded: their {place}")
        axes[0, len(panels) // 2].set_xlabel("time to first token / recompute")
        axes[0, 0].set_ylabel("right answers, %")
        # Not every method was measured in every shape.
        found: dict[str, Any] = {}
        for axis in axes[0]:
            marks, names = axis.get_legend_handles_labels()
            found |= dict(zip(names, marks, strict=True))
        labels = [name for name in METHODS if name in found]
        columns = min(5, 1 + len(panels))
        figure.legend(
            [found[n] for n in labels],
            labels,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
        )


def _panel(axis: Any, lines: list[Line]) -> None:
    for name in METHODS:
        own = [r for line in lines for r in line["results"] if r["method"] == name]
        if not own:
            continue
        y = 100 * sum(r["exact"] for r in own) / len(own)
        kind = name.partition(",")[0]  # a variant has a hollow mark in its method's colour
        color = _SAM_KV if name.startswith("sam_kv") else _COLORS.get(kind, _OTHER)
        hollow = name in ("sam_kv fusion", "reuse, not turned", "cacheblend, layer 2")
        axis.plot(
            _times(own), y, "D" if name == "sam_kv extremes" else "o", label=name, color=color,
            markerfacecolor="white" if hollow else color, markersize=6, clip_on=False,
        )  # fmt: skip
    axis.axvline(0.5, color=FAINT, linestyle=(0, (4, 2)), linewidth=1)
    axis.set_ylim(0, 102)
    axis.set_xlim(left=0)
    axis.grid(axis="y")


def _shapes(lines: Lines) -> list[str]:
    """Shapes, in ascending order of words."""
    found = {shape for _, shape in lines}
    return sorted(found, key=lambda shape: [int(n) for n in reversed(shape.split("x"))])


def _about(lines: list[Line]) -> str:
    """Command, machine and date."""
    line = max(lines, key=lambda line: str(line["date"]))
    machine, versions = line["machine"], line["versions"]
    tokens = sum(line["results"][0]["tokens"] for line in lines) / len(lines)
    items = sorted({line["items"] for line in lines})
    return (
        f"{tokens:,.0f} tokens a prompt; {' to '.join(map(str, items))} questions of each kind, "
        f"blocks of {line['block_size']} tokens.\n{machine['cpu']}, {machine['cores']} cores; "
        f"torch {versions['torch']}, transformers {versions['transformers']}; {line['date'][:10]}, "
        f"commit {line['commit']}; `{line['command']}`."
        + (f" Note: {line['note']}." if line["note"] else "")
        + "".join(dict.fromkeys(_added(added) for line in lines for added in line["added"]))
    )


def _added(line: Line) -> str:
    """The methods that were measured later, each together with `recompute`."""
    names = ", ".join(r["method"] for r in line["results"] if r["method"] != "recompute")
    return f"\n{names}: {line['date'][:10]}, commit {line['commit']}; `{line['command']}`."

"""Recall of heads and answers under them, as tables and a figure, from stored lines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keyhole import drawing
from keyhole.drawing import FAINT, INK
from keyhole.eval.comparisons import gain
from keyhole.eval.verify import BEST, WINDOW

#: The files in benchmarks/results/ of `python -m benchmarks.head_recall` and head_tasks.
Line = dict[str, Any]

_COLORS = ("#0b6e75", "#e08e4f", "#7a5ea8", "#b03a48", "#4c8c4a", "#2f6fb0")


def tables(line: Line) -> str:
    """A table per budget: a row per selector, a column per length, percent of the attention.

    A head has the 95 % interval of its gain over the window, in points, paired by text, if the
    line has the recall of each text.
    """
    cells = {(c["chooser"], c["budget"], c["length"]): _recalls(c) for c in line["results"]}
    names = list(dict.fromkeys(c["chooser"] for c in line["results"]))
    parts = []
    for budget in sorted({budget for _, budget, _ in cells}):
        lengths = sorted({n for _, b, n in cells if b == budget})
        heads = [f"budget {budget}", *(f"{n:,}" for n in lengths)]
        rows = [heads, ["---"] * len(heads)]
        for name in names:
            found = [(cells[name, budget, n], cells[WINDOW, budget, n]) for n in lengths]
            rows.append([name, *(_cell(own, window, name) for own, window in found)])
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts) + "\n"


def _recalls(cell: Line) -> list[float]:
    """Of each text; lines before 2026-11-30 have the mean alone."""
    return list(cell.get("recalls") or [cell["recall"]])


def _cell(own: Sequence[float], window: Sequence[float], name: str) -> str:
    mean = f"{100 * statistics.fmean(own):.1f}"
    if name in (WINDOW, BEST) or len(own) == 1:
        return mean
    difference = gain(own, window)
    return f"{mean} ({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"


def tasks(line: Line) -> str:
    """Right answers: a row per policy and share of the text that it reads, a column per task."""
    cells = {(c["policy"], c["share"], c["task"], c["words"]): c for c in line["results"]}
    cases = list(dict.fromkeys((task, words) for _, _, task, words in cells))
    of = line["results"][0]["of"]
    rows = [[f"right of {of}", "reads", *(f"{task}, {words:,} words" for task, words in cases)]]
    rows.append(["---"] * len(rows[0]))
    for name, share in sorted(dict.fromkeys(key[:2] for key in cells), key=lambda key: key[1]):
        found = [str(cells[name, share, *case]["right"]) for case in cases]
        rows.append([name, "everything" if share == 1 else f"1/{share}", *found])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def picture(line: Line, path: str | Path) -> None:
    """Writes a PNG with a panel per budget: recall against length, a line per selector."""
    results = line["results"]
    names = list(dict.fromkeys(c["chooser"] for c in results))
    budgets = sorted({c["budget"] for c in results})
    lengths = sorted({c["length"] for c in results})
    title = f"Attention of {line['settings']['model']} on the tokens that were chosen"
    size = (1.4 + 1.8 * len(budgets), 3.4)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with drawing.picture(path, title, line["date"], figsize=size, layout="constrained") as figure:
        axes = figure.subplots(1, len(budgets), sharey=True, squeeze=False)
        for axis, budget in zip(axes[0], budgets, strict=True):
            for number, name in enumerate(names):
                own = sorted(
                    (c["length"], statistics.fmean(_recalls(c)))
                    for c in results
                    if (c["chooser"], c["budget"]) == (name, budget)
                )
                axis.plot(*zip(*own, strict=True), label=name, **_look(name, number))
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
            axis.set_xlim(lengths[0] * 0.9, lengths[-1] * 1.1)
            axis.minorticks_off()
            axis.grid(axis="y")
            axis.set_axisbelow(True)
            axis.set_title(f"budget {budget}")
        axes[0][0].set_ylim(0, 1)
        axes[0][0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
        figure.supxlabel("tokens of context", fontsize=9)


def _look(name: str, number: int) -> dict[str, Any]:
    if name in (WINDOW, BEST):
        dashes = {"linestyle": (0, (4, 2))} if name == WINDOW else {}
        return {"color": INK if name == BEST else FAINT, "linewidth": 1.2, **dashes}
    color = _COLORS[number % len(_COLORS)]
    return {"color": color, "marker": "o", "markersize": 3, "linewidth": 1.4}

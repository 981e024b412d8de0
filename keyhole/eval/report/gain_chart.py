"""Gain of each method over its recent control, with its interval, and what the oracle would gain.

A row is a method with a budget. The interval is of the paired difference; where it crosses zero the
selection has shown nothing. A row is pale where the recent control is within 5 points of full
attention, so that nothing can be told. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keyhole.drawing import FAINT, INK, PALE
from keyhole.eval.report.plot_style import Look
from keyhole.eval.results.cells import Cell

#: Opacity of rows that cannot tell.
_PALE = 0.3
_WIDTH = 5.2


def with_gain(cells: Sequence[Cell]) -> list[Cell]:
    """Those that have a recent control beside them."""
    return [cell for cell in cells if cell.gain is not None]


def size(cells: Sequence[Cell]) -> tuple[float, float]:
    """Inches of a picture of cells with a gain."""
    return _WIDTH, 0.8 + 0.22 * len(cells)


def said(cell: Cell) -> str:
    """What a row says, in words."""
    gain = cell.comparison.gain if cell.comparison else None
    assert gain is not None
    text = f"{cell.label}: {100 * gain.points:+.1f} points ({100 * gain.low:.1f} to "
    text += f"{100 * gain.high:.1f}, p {gain.p:.3f})"
    if cell.oracle is not None and cell.recent is not None:
        text += f", oracle {100 * (cell.oracle - cell.recent):+.1f}"
    return text if cell.tells else f"{text}, cannot tell"


def draw(axis: Any, cells: Sequence[Cell], style: Mapping[str, Look]) -> dict[str, str]:
    """Draws cells with a gain, the first on top; gives what each row says, by its SVG id."""
    texts: dict[str, str] = {}
    axis.axvline(0, color=INK, linewidth=0.8, zorder=1)
    for row, cell in enumerate(cells):
        gain = cell.comparison.gain if cell.comparison else None
        assert gain is not None
        look, alpha = style[cell.name], 1.0 if cell.tells else _PALE
        axis.plot([100 * gain.low, 100 * gain.high], [row] * 2, color=look.color, alpha=alpha)
        texts[identity := f"gain-{row}"] = said(cell)
        axis.plot(
            100 * gain.points, row, look.mark, color=look.color, markersize=6, alpha=alpha,
            gid=identity, zorder=3,
        )  # fmt: skip
        if cell.oracle is not None and cell.recent is not None:
            oracle = 100 * (cell.oracle - cell.recent)
            axis.plot(oracle, row, "+", color=FAINT, markersize=7, alpha=alpha, zorder=2)
    axis.set_ylim(len(cells) - 0.5, -0.5)
    axis.set_yticks(range(len(cells)), [cell.label for cell in cells])
    axis.set_xlabel("points over the recent control")
    axis.set_axisbelow(True)
    axis.grid(axis="x", color=PALE)
    axis.tick_params(length=0, labelcolor=INK)
    axis.spines["left"].set_visible(False)
    return texts

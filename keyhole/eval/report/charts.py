"""Charts of the report, each drawn into a matplotlib axis.

    pareto      score against bytes read, a point per method and budget
    gains       gain of each method over its recent control, with its interval
    heat maps   attention that each layer keeps, and the depths at which a method finds the needle

In a Pareto chart the dashed line is full attention, and grey marks are controls: x the newest
tokens, + the oracle. A row of gains is pale if the recent control is within 5 points of full
attention, because methods cannot be told apart there. In heat maps dark is high, pale is zero, and
white is not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.config import bytes_text
from keyhole.drawing import FAINT, INK, PALE, matplotlib
from keyhole.eval.comparisons import ORACLE, RECENT
from keyhole.eval.policy_trace import ALL, SelectionMap
from keyhole.eval.report.cells import Cell, number
from keyhole.eval.report.plot_style import FILL, HALF, PAPER, MethodStyle

FULL = "full"
#: Marks of the controls.
_CONTROLS = {RECENT: "x", ORACLE: "+"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One method with one budget: bytes read per decode step, and the score from 0 to 1 with its
    interval, if any.

    The score of a perplexity is 1 / perplexity, so that more is better. on_front: no other point
    reads at most as much and scores at least as much; a point whose recent control is as good as
    full attention is never on the front.
    """

    cell: Cell
    bytes_per_step: float
    score: float
    interval: tuple[float, float] | None
    on_front: bool

    @property
    def text(self) -> str:
        """The point in words."""
        low_high = "" if self.interval is None else " ({:.0%} to {:.0%})".format(*self.interval)
        read = bytes_text(self.bytes_per_step)
        score = f"{self.score:.1%}{low_high}"
        if self.cell.place.is_perplexity:
            score = f"perplexity {1 / self.score:.2f}" if self.score else "no perplexity"
        return f"{self.cell.label}: {score}, {read} a step"


def points(cells: Sequence[Cell]) -> dict[str, list[Point]]:
    """The points of one place by name, small budgets first; cells without both numbers are skipped.

    A point is on the front unless another has at least its score for at most its bytes, and is
    better in one of them.
    """
    known = [
        (cell, cell.bytes_per_step, cell.score)
        for cell in cells
        if cell.bytes_per_step is not None and cell.bytes_per_step > 0 and cell.score is not None
    ]
    found: dict[str, list[Point]] = {}
    for cell, read, score in known:
        beaten = any(
            less <= read and more >= score and (less, more) != (read, score)
            for other, less, more in known
            if other.tells
        )
        point = Point(
            cell=cell,
            bytes_per_step=read,
            score=score,
            interval=cell.interval,
            on_front=cell.tells and not beaten,
        )
        found.setdefault(cell.name, []).append(point)
    for own in found.values():
        own.sort(key=lambda point: point.bytes_per_step)
    return found


def draw_pareto(
    axis: Any, cells: Sequence[Cell], style: Mapping[str, MethodStyle]
) -> dict[str, str]:
    """Draws the cells of one place into an axis; returns the text of each point by its SVG id."""
    found = points(cells)
    texts: dict[str, str] = {}
    for name, own in found.items():
        look = style[name]
        across = [point.bytes_per_step for point in own]
        if own[0].cell.policy == FULL:
            axis.axhline(own[0].score, color=INK, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
        axis.plot(across, [point.score for point in own], color=look.color, linewidth=1.5)
        for point in own:
            texts[identity := f"point-{len(texts)}"] = point.text
            _mark(axis, point, look, identity)
        axis.plot([], [], look.mark, linestyle="-", color=look.color, label=name, markersize=5)
    every = [point for own in found.values() for point in own]
    beside = control_points(cells)
    for name, read, score in beside:
        axis.plot(read, score, _CONTROLS[name], color=FAINT, markersize=5, zorder=3)
    _scale(axis, [point.bytes_per_step for point in every] + [read for _, read, _ in beside])
    if any(point.cell.place.is_perplexity for point in every):
        axis.set_ylim(0, 1.1 * max(point.score for point in every) or 1.0)
        axis.locator_params(axis="y", nbins=5)
        axis.set_ylabel("1 / perplexity")
    else:
        axis.set_ylim(-0.02, 1.04)
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
        axis.set_ylabel("score, %")
    return texts


def control_points(cells: Sequence[Cell]) -> list[tuple[str, float, float]]:
    """Name, bytes and score of the controls of some cells, each once."""
    found = []
    for cell in cells:
        comparison = cell.comparison
        for name in _CONTROLS:
            if comparison is not None and name in comparison.lines:
                read = number(comparison.lines[name].get("bytes_per_step"))
                if read:
                    found.append((name, read, comparison.controls[name]))
    return list(dict.fromkeys(found))


def _mark(axis: Any, point: Point, look: MethodStyle, identity: str) -> None:
    """Draws a mark, filled on the front, and the score's interval."""
    if point.interval is not None:
        x, (low, high) = point.bytes_per_step, point.interval
        axis.plot([x, x], [low, high], color=look.color, linewidth=3, alpha=0.2, zorder=1)
    axis.plot(
        point.bytes_per_step,
        point.score,
        look.mark,
        color=look.color,
        markerfacecolor=look.color if point.on_front else PAPER,
        markersize=6,
        clip_on=False,
        gid=identity,
        zorder=4,
    )


def _scale(axis: Any, read: Sequence[float]) -> None:
    low, high = min(read) / 1.25, max(read) * 1.25
    axis.set_xscale("log", base=2)
    axis.set_xlim(low, high)
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    every = math.ceil(len(powers) / 5)
    ticks = [2.0**power for power in powers if power % every == 0]
    axis.set_xticks(ticks, [_tick(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_axisbelow(True)
    axis.grid(axis="y")
    axis.tick_params(length=0, labelcolor=FAINT)
    axis.set_xlabel("read per decode step")


def _tick(size: float) -> str:
    """A power of two without its decimals: 512 KiB."""
    return bytes_text(size).replace(".0 ", " ")


#: Opacity of rows that cannot tell methods apart.
_PALE = 0.3
_WIDTH = 5.2


def with_gain(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that have a recent control."""
    return [cell for cell in cells if cell.gain is not None]


def gain_size(cells: Sequence[Cell]) -> tuple[float, float]:
    """Size in inches of a picture of cells with a gain."""
    return _WIDTH, 0.8 + 0.22 * len(cells)


def gain_in_words(cell: Cell) -> str:
    """The row in words."""
    gain = cell.comparison.gain if cell.comparison else None
    assert gain is not None
    text = f"{cell.label}: {100 * gain.points:+.1f} points ({100 * gain.low:.1f} to "
    text += f"{100 * gain.high:.1f}, p {gain.p:.3f})"
    if cell.oracle is not None and cell.recent is not None:
        text += f", oracle {100 * (cell.oracle - cell.recent):+.1f}"
    return text if cell.tells else f"{text}, cannot tell"


def draw_gains(
    axis: Any, cells: Sequence[Cell], style: Mapping[str, MethodStyle]
) -> dict[str, str]:
    """Draws cells with a gain, the first on top; returns the text of each row by its SVG id."""
    texts: dict[str, str] = {}
    axis.axvline(0, color=INK, linewidth=0.8, zorder=1)
    for row, cell in enumerate(cells):
        gain = cell.comparison.gain if cell.comparison else None
        assert gain is not None
        look, alpha = style[cell.name], 1.0 if cell.tells else _PALE
        axis.plot([100 * gain.low, 100 * gain.high], [row] * 2, color=look.color, alpha=alpha)
        texts[identity := f"gain-{row}"] = gain_in_words(cell)
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


#: With more different depths than the first number, the second number of bins is used.
_MOST_DEPTHS, _BINS = 11, 10
#: With more columns than this, cells have no room for numbers.
_MOST_NUMBERS = 20
#: Shares from which a cell is half dark, and dark enough for a white number.
_HALF, _DARK = 0.58, 0.78


@dataclass(frozen=True, eq=False)
class Grid:
    """Means of the values in each cell, float64 [rows, columns], NaN where there are none."""

    values: np.ndarray
    counts: np.ndarray
    rows: tuple[str, ...]
    columns: tuple[str, ...]


def recall_grid(cells: Sequence[Cell]) -> Grid | None:
    """Recall of each method and budget (row) in each layer; None if no cell has any."""
    known = [cell for cell in cells if any(r is not None for r in cell.recall_per_layer)]
    if not known:
        return None
    depth = max(len(cell.recall_per_layer) for cell in known)
    values = np.full((len(known), depth), np.nan)
    for row, cell in zip(values, known, strict=True):
        for layer, recall in enumerate(cell.recall_per_layer):
            row[layer] = np.nan if recall is None else recall
    names, layers = tuple(cell.label for cell in known), tuple(map(str, range(depth)))
    return Grid(values, (~np.isnan(values)).astype(int), names, layers)


def needle_grid(cells: Sequence[Cell]) -> Grid | None:
    """Mean score by depth (row, the start of the text first) and length; None without depths.

    cells: one method with one budget, at one task, with its lengths and depths. The requested depth
    is used, although the needle, which is put between sentences, is slightly off it.
    """
    found = [
        (cell.place.length, depth if cell.place.depth is None else cell.place.depth, score)
        for cell in cells
        for depth, score in zip(cell.depths, cell.scores, strict=False)
        if depth is not None and score is not None and 0 <= depth <= 1
    ]
    if not found:
        return None
    lengths = sorted({length for length, _, _ in found})
    depths = sorted({round(depth, 3) for _, depth, _ in found})
    binned = len(depths) > _MOST_DEPTHS
    rows = _BINS if binned else len(depths)
    sums, counts = np.zeros((rows, len(lengths))), np.zeros((rows, len(lengths)), int)
    for length, depth, score in found:
        row = min(int(depth * _BINS), _BINS - 1) if binned else depths.index(round(depth, 3))
        sums[row, lengths.index(length)] += score
        counts[row, lengths.index(length)] += 1
    values = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    names = (
        tuple(f"{100 * n // _BINS}–{100 * (n + 1) // _BINS} %" for n in range(_BINS))
        if binned
        else tuple(f"{100 * depth:g} %" for depth in depths)
    )
    return Grid(values, counts, names, tuple(f"{length:,}" for length in lengths))


def recall_size(grid: Grid) -> tuple[float, float]:
    """Inches of a recall map."""
    return max(3.4, min(9.0, 2.2 + 0.42 * len(grid.columns))), 0.8 + 0.24 * len(grid.rows)


def needle_size(grid: Grid) -> tuple[float, float]:
    """Inches of a needle map."""
    return max(2.2, min(4.5, 1.0 + 0.48 * len(grid.columns))), 0.9 + 0.22 * len(grid.rows)


def draw_heat_map(axis: Any, grid: Grid) -> None:
    """Draws a grid into an axis, with the numbers in percent if there is room.

    Cells of equal value are one patch, which keeps the SVG small.
    """
    rows, columns = grid.values.shape
    places: dict[float, list[tuple[int, int]]] = {}
    for (row, column), value in np.ndenumerate(grid.values):
        if not np.isnan(value):
            places.setdefault(round(float(np.clip(value, 0, 1)), 2), []).append((row, column))
    squares = [place for own in places.values() for place in own]
    axis.add_patch(_squares(squares, facecolor=PALE))
    for value, own in places.items():
        if value > 0:
            axis.add_patch(_squares(own, facecolor=FILL, alpha=value))
        if columns <= _MOST_NUMBERS:
            ink = PAPER if value >= _DARK else HALF if value >= _HALF else INK
            words = {"ha": "center", "va": "center", "fontsize": 7.5, "color": ink}
            for row, column in own:
                axis.text(column + 0.5, row + 0.52, f"{100 * value:.0f}", **words)
    axis.set_xlim(0, columns)
    axis.set_ylim(rows, 0)
    every = math.ceil(columns / _MOST_NUMBERS)
    marked = range(0, columns, every)
    axis.set_xticks([n + 0.5 for n in marked], [grid.columns[n] for n in marked])
    axis.set_yticks([n + 0.5 for n in range(rows)], grid.rows)
    axis.tick_params(length=0, labelcolor=INK)
    axis.xaxis.label.set_color(FAINT)
    axis.spines[:].set_visible(False)


def _squares(places: Sequence[tuple[int, int]], **look: Any) -> Any:
    """One patch of the cells at these rows and columns, with a gap between neighbours."""
    patches = matplotlib()[2]
    corners: list[tuple[float, float]] = []
    for row, column in places:
        left, right, top, bottom = column + 0.03, column + 0.97, row + 0.04, row + 0.96
        corners += [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    path = patches.Path
    codes = [path.MOVETO, path.LINETO, path.LINETO, path.LINETO, path.CLOSEPOLY] * len(places)
    return patches.PathPatch(path(corners, codes), linewidth=0, **look)


def draw_selection_map(axis: Any, found: SelectionMap, *, color: str = FILL) -> None:
    """Draws a map into an axis: positions to the right, steps downwards; dark cells were read.

    Read cells are opaque `color` on the pale area of existing tokens.
    """
    rgba = np.empty((*found.shares.shape, 4))
    rgba[..., :3] = matplotlib()[1].to_rgb(color)
    rgba[..., 3] = found.shares / ALL
    first = found.prompt_tokens + 1
    axis.fill(
        [0, first, found.tokens, found.tokens, 0],
        [0, 0, found.steps - 1, found.steps, found.steps],
        facecolor=PALE,
        linewidth=0,
        zorder=0,
    )
    rows, columns = found.shares.shape
    right, bottom = columns * found.tokens_per_column, rows * found.steps_per_row
    extent = (0, right, bottom, 0)
    axis.imshow(rgba, aspect="auto", interpolation="none", extent=extent, zorder=1)
    axis.axvline(found.prompt_tokens, color=INK, linewidth=0.7, linestyle=(0, (4, 3)))
    for mark in found.marks:
        axis.plot(mark, -0.02 * found.steps, "v", color=INK, markersize=3.5, clip_on=False)
    axis.set_xlim(0, found.tokens)
    axis.set_ylim(found.steps, 0)
    axis.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    axis.yaxis.get_major_locator().set_params(integer=True, nbins=4)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_title(found.subject, pad=7)
    axis.tick_params(length=0, labelcolor=FAINT)
    axis.spines[:].set_visible(False)

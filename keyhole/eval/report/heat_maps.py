"""Two heat-maps: attention that each layer keeps, and where in a text a method finds the needle.

Dark is much, pale is none, white was not measured. Needs matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.drawing import FAINT, INK, PALE, STYLE, matplotlib, save
from keyhole.errors import ConfigError
from keyhole.eval.report.plot_style import FILL, HALF, PAPER
from keyhole.eval.results.cells import Cell

#: More different depths than these are put into as many bins of equal width.
_MOST_DEPTHS, _BINS = 11, 10
#: Cells more than these across have no room for numbers.
_MOST_NUMBERS = 20
#: From these shares on, a cell is half dark, or so dark that what stands in it is white.
_HALF, _DARK = 0.58, 0.78
_COLUMNS = 5


@dataclass(frozen=True, eq=False)
class Grid:
    """Means of what fell into each cell, float64 [rows, columns], NaN where nothing did."""

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

    cells: one method with one budget, at one task, its lengths and depths. A depth that was asked
    for counts as such: needles stand between sentences, so that they are a little off.
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


def recall_chart(cells: Sequence[Cell], path: str | Path, *, title: str) -> None:
    """Writes the picture of one place's recall; ConfigError if nothing is to be drawn."""
    grid = recall_grid(cells)
    if grid is None:
        raise ConfigError("no line has recall_per_layer; there is nothing to draw")
    pyplot, _, patches = matplotlib()
    with pyplot.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=recall_size(grid), layout="constrained")
        draw(axis, grid, patches)
        axis.set_xlabel("layer")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        save(figure, path)
        pyplot.close(figure)


def needle_chart(groups: Sequence[Sequence[Cell]], path: str | Path, *, title: str) -> None:
    """Writes a panel for each group of cells (`needle_grid`); ConfigError without depths."""
    grids = [(group[0].label, grid) for group in groups if (grid := needle_grid(group))]
    if not grids:
        raise ConfigError("no line has depths with its scores; there is nothing to draw")
    pyplot, _, patches = matplotlib()
    columns = min(_COLUMNS, len(grids))
    rows = math.ceil(len(grids) / columns)
    width, height = needle_size(grids[0][1])
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            rows,
            columns,
            figsize=(width * columns, height * rows + 0.4),
            squeeze=False,
            layout="constrained",
        )
        for axis in axes.flat[len(grids) :]:
            axis.set_visible(False)
        for axis, (label, grid) in zip(axes.flat, grids, strict=False):
            draw(axis, grid, patches)
            axis.set_title(label)
            axis.set_xlabel("tokens of the text")
        for axis in axes[:, 0]:
            axis.set_ylabel("depth of the needle")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        save(figure, path)
        pyplot.close(figure)


def recall_size(grid: Grid) -> tuple[float, float]:
    """Inches of a recall map."""
    return max(3.4, min(9.0, 2.2 + 0.42 * len(grid.columns))), 0.8 + 0.24 * len(grid.rows)


def needle_size(grid: Grid) -> tuple[float, float]:
    """Inches of a needle map."""
    return max(2.2, min(4.5, 1.0 + 0.48 * len(grid.columns))), 0.9 + 0.22 * len(grid.rows)


def draw(axis: Any, grid: Grid, patches: Any) -> None:
    """Draws a grid into an axis, with the numbers in percent where there is room for them.

    patches: `matplotlib.patches`. Cells of one value are one patch, which keeps an SVG small.
    """
    rows, columns = grid.values.shape
    places: dict[float, list[tuple[int, int]]] = {}
    for (row, column), value in np.ndenumerate(grid.values):
        if not np.isnan(value):
            places.setdefault(round(float(np.clip(value, 0, 1)), 2), []).append((row, column))
    squares = [place for own in places.values() for place in own]
    axis.add_patch(_squares(squares, patches, facecolor=PALE))
    for value, own in places.items():
        if value > 0:
            axis.add_patch(_squares(own, patches, facecolor=FILL, alpha=value))
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


def _squares(places: Sequence[tuple[int, int]], patches: Any, **look: Any) -> Any:
    """One patch of the cells at these rows and columns, with a gap between neighbours."""
    corners: list[tuple[float, float]] = []
    for row, column in places:
        left, right, top, bottom = column + 0.03, column + 0.97, row + 0.04, row + 0.96
        corners += [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    path = patches.Path
    codes = [path.MOVETO, path.LINETO, path.LINETO, path.LINETO, path.CLOSEPOLY] * len(places)
    return patches.PathPatch(path(corners, codes), linewidth=0, **look)

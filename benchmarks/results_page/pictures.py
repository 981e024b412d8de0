"""The figures of right answers in docs/results/. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results_page.cells import ASKED, TaskCells, column_marks, columns, methods, of_task
from benchmarks.results_page.text import month
from keyhole.drawing import FAINT, picture
from keyhole.eval.line_file import Line
from keyhole.eval.policy_trace import SelectionMap
from keyhole.eval.report import charts
from keyhole.eval.report.cells import Cell
from keyhole.eval.report.plot_style import method_styles

_HEAT_MAP, _MAPS = "evaluation.png", "evaluation-errors.png"
#: Sizes of panels in inches, and panels per row.
_PARETO, _PARETO_COLUMNS = (4.6, 3.1), 2
_MAP, _MAP_COLUMNS = (3.1, 2.3), 3


@dataclass(frozen=True, kw_only=True)
class Names:
    """File names of the figures that have data; pareto: by task."""

    heat_map: str | None = None
    pareto: dict[str, str] = field(default_factory=dict)
    maps: str | None = None

    @property
    def all(self) -> list[str]:
        """All file names."""
        return [name for name in (self.heat_map, *self.pareto.values(), self.maps) if name]


def names(found: Sequence[Cell], errors: Sequence[Line]) -> Names:
    """The figures that can be drawn."""
    drawn = {
        task: f"evaluation-{task.removeprefix('tiny_').replace('_', '-')}.png"
        for task in ASKED
        if charts.points(of_task(found, task))
    }
    with_map = any(line.get("map") for line in errors)
    return Names(
        heat_map=_HEAT_MAP if found else None, pareto=drawn, maps=_MAPS if with_map else None
    )


def write(found: Sequence[Cell], errors: Sequence[Line], folder: Path, date: str) -> None:
    """Writes the figures as PNGs; date: stored as their description."""
    pictures = names(found, errors)
    for task, name in pictures.pareto.items():
        title = f"{ASKED[task].title}: {_what(date)}"
        _pareto(of_task(found, task), folder / name, title, date)
    if pictures.heat_map is not None:
        _heat_map(found, folder / pictures.heat_map, date)
    if pictures.maps is not None:
        _maps([line for line in errors if line.get("map")], folder / pictures.maps, date)


def _pareto(own: Sequence[Cell], path: Path, title: str, date: str) -> None:
    """A panel per length."""
    known = [
        (length, cells)
        for length in sorted({cell.place.length for cell in own})
        if charts.points(cells := [cell for cell in own if cell.place.length == length])
    ]
    style = method_styles((cell.policy, cell.name) for cell in own)

    def draw(figure: Any, axes: list[Any]) -> None:
        handles: dict[str, Any] = {}
        for axis, (length, cells) in zip(axes, known, strict=True):
            charts.draw_pareto(axis, cells, style)
            axis.set_title(f"{length:,} tokens")
            handles.update(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        most = 3 if len(known) == 1 else 6
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=most, frameon=False
        )

    _figure(draw, len(known), _PARETO, _PARETO_COLUMNS, path, title, date, extra=0.9)


def _heat_map(found: Sequence[Cell], path: Path, date: str) -> None:
    """A panel per task: percent of right answers, by method, length and budget."""
    grids = [(task, score_grid(own)) for task in ASKED if (own := of_task(found, task))]
    width = max(4.5, *(1.6 + 0.38 * len(grid.columns) for _, grid in grids))
    height = max(0.9 + 0.22 * len(grid.rows) for _, grid in grids)

    def draw(_: Any, axes: list[Any]) -> None:
        for axis, (task, grid) in zip(axes, grids, strict=True):
            charts.draw_heat_map(axis, grid)
            axis.set_title(ASKED[task].title)
            axis.set_xticks([n + 0.5 for n in range(len(grid.columns))], grid.columns, fontsize=7)

    title = f"right answers, %, by length and budget: {_what(date)}"
    _figure(draw, len(grids), (width, height), 1, path, title, date)


def _what(date: str) -> str:
    """A caption that says that this is not a comparison of selection rules."""
    return f"configurations of {month(date)}, dense layers unequal"


def score_grid(own: Sequence[Cell]) -> charts.Grid:
    """Scores of one task; NaN where unmeasured. Full attention is in every column."""
    table, heads, rows = TaskCells(own), columns(own), methods(own)
    cells = [table.row(name, heads) for name in rows]
    scores = [[None if cell is None else cell.score for cell in row] for row in cells]
    values = np.array(scores, dtype=float)
    marks = column_marks(heads, "{budget:,}\nof {length:,}")
    return charts.Grid(values, (~np.isnan(values)).astype(int), tuple(rows), tuple(marks))


def _maps(lines: Sequence[Line], path: Path, date: str) -> None:
    """A panel per failing cell of the first task and length that has any."""
    tasks = list(ASKED)
    place = min((tasks.index(line["task"]), line["length"]) for line in lines)
    shown = [line for line in lines if (tasks.index(line["task"]), line["length"]) == place]
    style = method_styles((line["method"], line["method"]) for line in shown)

    def draw(figure: Any, axes: list[Any]) -> None:
        for axis, line in zip(axes, shown, strict=True):
            kept, look = SelectionMap.from_json(line["map"]), style[line["method"]]
            charts.draw_selection_map(axis, kept, color=look.color)
            axis.axhline(line["map_step"], color=look.color, linewidth=1.2)
            axis.set_title(f"{line['method']}, {kept.subject}", pad=7)
        figure.supxlabel("position in the text", fontsize=9, color=FAINT)
        figure.supylabel("decode step", fontsize=9, color=FAINT)

    task, length = shown[0]["task"], shown[0]["length"]
    title = f"{ASKED[task].title.lower()}, {length:,} tokens, a budget of {length // 8:,}"
    _figure(draw, len(shown), _MAP, _MAP_COLUMNS, path, title, date)


def _figure(
    draw: Callable[[Any, list[Any]], None],
    count: int,
    panel: tuple[float, float],
    most: int,
    path: Path,
    title: str,
    date: str,
    extra: float = 0.5,
) -> None:
    """A PNG of several panels, at most `most` per row; sizes in inches."""
    across = min(most, count)
    down = math.ceil(count / across)
    size = (panel[0] * across, panel[1] * down + extra)
    path.parent.mkdir(parents=True, exist_ok=True)
    with picture(path, title, date, figsize=size, layout="constrained") as figure:
        axes = figure.subplots(down, across, squeeze=False)
        for axis in axes.flat[count:]:
            axis.set_visible(False)
        draw(figure, list(axes.flat[:count]))

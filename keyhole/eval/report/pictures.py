"""The pictures of the report: SVGs, each with words above it and words that describe it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from keyhole.drawing import FAINT, matplotlib
from keyhole.errors import ConfigError
from keyhole.eval.policy_trace import SelectionMap
from keyhole.eval.report import charts
from keyhole.eval.report.cells import Cell, place_name, places
from keyhole.eval.report.plot_style import NOTHING, SVG_STYLE, Look, inline_svg

#: Width in inches above which a picture has its own row.
_WIDE = 5.3
#: Inches of the pictures whose size does not depend on what they show.
_PARETO, _MAP = (3.7, 2.7), (2.9, 1.75)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An SVG and the words above it; wide ones scroll on a phone. inches: its width."""

    title: str
    svg: Markup
    inches: float
    look: Look | None = None

    @property
    def wide(self) -> bool:
        """Whether it has a row of its own."""
        return self.inches > _WIDE


@dataclass(eq=False)
class Studio:
    """Makes pictures, each with its own ids."""

    style: Mapping[str, Look]
    count: int = 0
    tools: tuple[Any, Any, Any] = field(default_factory=matplotlib)

    def picture(
        self,
        title: str,
        size: tuple[float, float],
        label: str,
        draw: Callable[[Any], dict[str, str] | None],
        *,
        look: Look | None = None,
        image_color: str = "",
    ) -> Picture:
        """An SVG of one axis; size in inches; `draw` returns texts by SVG id."""
        pyplot = self.tools[0]
        self.count += 1
        with pyplot.rc_context(SVG_STYLE):
            figure, axis = pyplot.subplots(figsize=size, layout="constrained")
            try:
                titles = draw(axis) or {}
                identity = f"p{self.count}"
                svg = inline_svg(figure, identity, label, titles=titles, image_color=image_color)
            finally:
                pyplot.close(figure)
        # matplotlib escapes text, and inline_svg what it adds.
        return Picture(title=title, svg=Markup(svg), inches=size[0], look=look)


def pareto_pictures(found: Sequence[Cell], studio: Studio) -> list[Picture]:
    """One for each place: score against bytes read."""
    by_place = places(found)
    pictures = []
    for at, own in by_place.items():
        by_name = charts.points(own)
        if not by_name:
            continue
        title = place_name(at, by_place)
        said = "; ".join(point.text for points in by_name.values() for point in points)
        label = f"Score against bytes read per decode step, {title}. {said}."
        draw = functools.partial(charts.draw_pareto, cells=own, style=studio.style)
        pictures.append(studio.picture(title, _PARETO, label, draw))
    return pictures


def gain_pictures(found: Sequence[Cell], studio: Studio) -> list[Picture]:
    """One for each place whose methods have controls: gains over the recent one."""
    by_place = places(found)
    pictures = []
    for at, every in by_place.items():
        own = charts.with_gain(every)
        if not own:
            continue
        title = place_name(at, by_place)
        label = (
            f"Points over the recent control, {title}. {'; '.join(map(charts.gain_in_words, own))}."
        )
        draw = functools.partial(charts.draw_gains, cells=own, style=studio.style)
        pictures.append(studio.picture(title, charts.gain_size(own), label, draw))
    return pictures


def needle_pictures(found: Sequence[Cell], studio: Studio) -> dict[str, dict[str, list[Picture]]]:
    """By task (and setup and model) and budget a picture for each method, of all its depths."""
    asked = {cell.place.needles for cell in found}
    groups: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in found:
        task = place_name(cell.place.needles, asked)
        groups.setdefault((task, cell.name, cell.budget or 0), []).append(cell)
    pictures: dict[str, dict[str, list[Picture]]] = {}
    for (task, name, budget), own in sorted(groups.items(), key=lambda group: group[0][2]):
        grid = charts.needle_grid(own)
        if grid is None:
            continue

        def draw(axis: Any, grid: charts.Grid = grid) -> None:
            charts.draw_heat_map(axis, grid, studio.tools[2])
            axis.set_xlabel("tokens of the text")
            axis.set_ylabel("depth", color=FAINT)

        said = (
            f"Score in percent by depth (rows) and length, {task}, {own[0].label}: {_said(grid)}."
        )
        size, look = charts.needle_size(grid), studio.style[name]
        row = f"Budget of {budget:,} tokens" if budget else "Without a budget"
        of_task = pictures.setdefault(task, {})
        of_task.setdefault(row, []).append(studio.picture(name, size, said, draw, look=look))
    return pictures


def recall_pictures(found: Sequence[Cell], studio: Studio) -> list[Picture]:
    """One for each place: recall of each layer, with a row for each method and budget."""
    by_place = places(found)
    pictures = []
    for at, own in by_place.items():
        grid = charts.recall_grid(own)
        if grid is None:
            continue

        def draw(axis: Any, grid: charts.Grid = grid) -> None:
            charts.draw_heat_map(axis, grid, studio.tools[2])
            axis.set_xlabel("layer")

        title = place_name(at, by_place)
        label = f"Attention kept by each layer in percent, {title}: {_said(grid)}."
        pictures.append(studio.picture(title, charts.recall_size(grid), label, draw))
    return pictures


def map_pictures(found: Sequence[Cell], studio: Studio) -> dict[str, list[Picture]]:
    """By place and method the maps that its line stores; what is no map is left out."""
    by_place = places(found)
    pictures: dict[str, list[Picture]] = {}
    for at, own in by_place.items():
        for cell in own:
            title, look = f"{place_name(at, by_place)}: {cell.label}", studio.style[cell.name]
            for stored in cell.selection_maps:
                try:
                    kept = SelectionMap.from_json(stored)
                except ConfigError:
                    continue

                def draw(axis: Any, kept: SelectionMap = kept, color: str = look.color) -> None:
                    charts.draw_selection_map(axis, kept, color=color, colors=studio.tools[1])
                    axis.set_title("")
                    axis.set_xlabel("position in the text", color=FAINT)
                    axis.set_ylabel("decode step", color=FAINT)

                label = f"Tokens read in {kept.steps} decode steps, {title}, {kept.subject}"
                picture = studio.picture(
                    kept.subject, _MAP, label, draw, look=look, image_color=look.color
                )
                pictures.setdefault(title, []).append(picture)
    return pictures


def _said(grid: charts.Grid) -> str:
    """The numbers of a heat-map in words, row by row."""
    rows = []
    for name, values in zip(grid.rows, grid.values.tolist(), strict=True):
        texts = [NOTHING if math.isnan(v) else f"{100 * v:.0f}" for v in values]
        rows.append(f"{name}: {', '.join(texts)}")
    return "; ".join(rows)

"""One HTML file about an evaluation: tables, pictures, and where every number comes from.

    python -m keyhole.evaluate.report_page RESULTS.jsonl REPORT.html

The file needs nothing else: no network, no other file. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from keyhole.drawing import FAINT, matplotlib
from keyhole.errors import ConfigError, KeyholeError
from keyhole.evaluate import heat_maps, pareto, report_tables, selection_map
from keyhole.evaluate.cells import SETUPS, Cell, Line, cells, place_name, places, read_lines
from keyhole.evaluate.inline_svg import SVG_STYLE, inline_svg
from keyhole.evaluate.looks import THEME, Look, looks
from keyhole.evaluate.selection_map import SelectionMap

#: Where the template, its style sheet and its script lie.
_HERE = Path(__file__).parent
#: So many tables are open when the page is opened; the others are a click away.
_MOST_OPEN = 6
#: Inches from which on a picture has a row of its own.
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
class _Studio:
    """Makes pictures, each with ids of its own."""

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
        """An SVG of one axis; size in inches; `draw` gives texts by SVG id."""
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


def write_report(lines: list[Line], path: str | Path) -> None:
    """Writes the page of an evaluation's lines; ConfigError without lines, or if it cannot."""
    page = render(lines)
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report {str(path)!r}: {error}") from error


def render(lines: Sequence[Line]) -> str:
    """The page as text."""
    found = cells(lines)
    if not found:
        raise ConfigError("there are no lines to report; run `keyhole eval` first")
    style = looks((cell.policy, cell.name) for cell in found)
    studio = _Studio(style)
    runs, run_of = report_tables.runs(found)
    tables = report_tables.tables(found, style, run_of)
    used = {column.key for table in tables for column in table.columns}
    days = sorted({date[:10] for run in runs for date in run.dates})
    models = list(dict.fromkeys(cell.place.model for cell in found))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report_page.html").render(
        style_sheet=Markup(_variables() + (_HERE / "report_page.css").read_text()),
        script=Markup((_HERE / "report_page.js").read_text()),
        variable=lambda color: THEME[color][0],
        models=models,
        days=days,
        num_cells=len(found),
        tasks=len({cell.place.task for cell in found}),
        lengths=sorted({cell.place.length for cell in found if cell.place.length}),
        style=style,
        overview=report_tables.overview(found, style),
        pareto=_pareto(found, studio),
        tables=tables,
        most_open=_MOST_OPEN,
        needles=_needles(found, studio),
        recalls=_recalls(found, studio),
        maps=_maps(found, studio),
        columns=[column for column in report_tables.COLUMNS if column.key in used],
        setups={at: SETUPS[at] for at in SETUPS if any(cell.place.setup == at for cell in found)},
        settings=report_tables.settings(found),
        runs=runs,
    )


def _pareto(found: Sequence[Cell], studio: _Studio) -> list[Picture]:
    by_place = places(found)
    pictures = []
    for at, own in by_place.items():
        by_name = pareto.points(own)
        if not by_name:
            continue
        title = place_name(at, by_place)
        said = "; ".join(point.text for points in by_name.values() for point in points)
        label = f"Score against bytes read per decode step, {title}. {said}."
        draw = functools.partial(pareto.draw, cells=own, style=studio.style)
        pictures.append(studio.picture(title, _PARETO, label, draw))
    return pictures


def _needles(found: Sequence[Cell], studio: _Studio) -> dict[str, dict[str, list[Picture]]]:
    """By task (and setup and model) and budget a picture for each method."""
    by_place = places(found)
    groups: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in found:
        task = place_name(dataclasses.replace(cell.place, length=0), by_place)
        groups.setdefault((task, cell.name, cell.budget or 0), []).append(cell)
    pictures: dict[str, dict[str, list[Picture]]] = {}
    for (task, name, budget), own in sorted(groups.items(), key=lambda group: group[0][2]):
        grid = heat_maps.needle_grid(own)
        if grid is None:
            continue

        def draw(axis: Any, grid: heat_maps.Grid = grid) -> None:
            heat_maps.draw(axis, grid, studio.tools[2])
            axis.set_xlabel("tokens of the text")
            axis.set_ylabel("depth", color=FAINT)

        said = (
            f"Score in percent by depth (rows) and length, {task}, {own[0].label}: {_said(grid)}."
        )
        size, look = heat_maps.needle_size(grid), studio.style[name]
        row = f"Budget of {budget:,} tokens" if budget else "Without a budget"
        of_task = pictures.setdefault(task, {})
        of_task.setdefault(row, []).append(studio.picture(name, size, said, draw, look=look))
    return pictures


def _recalls(found: Sequence[Cell], studio: _Studio) -> list[Picture]:
    by_place = places(found)
    pictures = []
    for at, own in by_place.items():
        grid = heat_maps.recall_grid(own)
        if grid is None:
            continue

        def draw(axis: Any, grid: heat_maps.Grid = grid) -> None:
            heat_maps.draw(axis, grid, studio.tools[2])
            axis.set_xlabel("layer")

        title = place_name(at, by_place)
        label = f"Attention kept by each layer in percent, {title}: {_said(grid)}."
        pictures.append(studio.picture(title, heat_maps.recall_size(grid), label, draw))
    return pictures


def _maps(found: Sequence[Cell], studio: _Studio) -> dict[str, list[Picture]]:
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
                    selection_map.draw(axis, kept, color=color, colors=studio.tools[1])
                    axis.set_title("")
                    axis.set_xlabel("position in the text", color=FAINT)
                    axis.set_ylabel("decode step", color=FAINT)

                label = f"Tokens read in {kept.steps} decode steps, {title}, {kept.subject}"
                picture = studio.picture(
                    kept.subject, _MAP, label, draw, look=look, image_color=look.color
                )
                pictures.setdefault(title, []).append(picture)
    return pictures


def _said(grid: heat_maps.Grid) -> str:
    """The numbers of a heat-map in words, row by row."""
    rows = []
    for name, values in zip(grid.rows, grid.values.tolist(), strict=True):
        texts = [report_tables.NOTHING if math.isnan(v) else f"{100 * v:.0f}" for v in values]
        rows.append(f"{name}: {', '.join(texts)}")
    return "; ".join(rows)


def _variables() -> str:
    """The theme as CSS variables."""
    day = "".join(f"--{name}: {light};" for name, light, _ in THEME.values())
    night = "".join(f"--{name}: {dark};" for name, _, dark in THEME.values())
    return (
        f":root {{ color-scheme: light dark; {day} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {night} }} }}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page of a file of results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", help="JSON lines of `keyhole eval`")
    parser.add_argument("report", help="the HTML file to write")
    parsed = parser.parse_args(arguments)
    try:
        write_report(read_lines(parsed.results), parsed.report)
    except KeyholeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

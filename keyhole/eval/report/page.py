"""The report of an evaluation as one HTML file: tables, pictures, and the origin of every number.

    python -m keyhole.eval.report.page RESULTS.jsonl REPORT.html

The file is self-contained: it needs no network and no other file. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from keyhole.drawing import FAINT, matplotlib
from keyhole.errors import ConfigError, KeyholeError, why
from keyhole.eval.line_file import Line, LineFile
from keyhole.eval.policy_trace import SelectionMap
from keyhole.eval.report import charts
from keyhole.eval.report import tables as report_tables
from keyhole.eval.report.cells import (
    SETUPS,
    TERMS_NAMES,
    Cell,
    Run,
    cells,
    place_name,
    places,
    runs_of,
    settings_by_name,
)
from keyhole.eval.report.plot_style import (
    NOTHING,
    SVG_STYLE,
    THEME,
    MethodStyle,
    Styles,
    inline_svg,
    method_styles,
)
from keyhole.eval.report.tables import Overview, ReportTable
from keyhole.eval.settings import TERMS

#: Width in inches above which a picture has its own row.
_WIDE = 5.3
#: Sizes in inches of the pictures whose size does not depend on their content.
_PARETO, _MAP = (3.7, 2.7), (2.9, 1.75)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An SVG and its title; wide ones scroll on a phone. inches: its width."""

    title: str
    svg: Markup
    inches: float
    look: MethodStyle | None = None

    @property
    def wide(self) -> bool:
        """Whether it fills a row."""
        return self.inches > _WIDE


@dataclass(eq=False)
class Studio:
    """Makes pictures with unique ids."""

    style: Styles
    count: int = 0

    def picture(
        self,
        title: str,
        size: tuple[float, float],
        label: str,
        draw: Callable[[Any], dict[str, str] | None],
        *,
        look: MethodStyle | None = None,
        image_color: str = "",
    ) -> Picture:
        """An SVG of one axis; size in inches; `draw` returns texts by SVG id."""
        pyplot = matplotlib()[0]
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
    """A picture for each place: score against bytes read."""
    by_place = places(found)
    pictures = []
    for at, own in by_place.items():
        by_name = charts.points(own)
        if not by_name:
            continue
        title = place_name(at, by_place)
        description = "; ".join(point.text for points in by_name.values() for point in points)
        label = f"Score against bytes read per decode step, {title}. {description}."
        draw = functools.partial(charts.draw_pareto, cells=own, style=studio.style)
        pictures.append(studio.picture(title, _PARETO, label, draw))
    return pictures


def gain_pictures(found: Sequence[Cell], studio: Studio) -> list[Picture]:
    """A picture for each place whose methods have controls: gains over the recent one."""
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
    """A picture for each method with all its depths, by task (and setup and model) and budget."""
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
            charts.draw_heat_map(axis, grid)
            axis.set_xlabel("tokens of the text")
            axis.set_ylabel("depth", color=FAINT)

        description = (
            f"Score in percent by depth (rows) and length, {task}, {own[0].label}: {_said(grid)}."
        )
        size, look = charts.needle_size(grid), studio.style[name]
        row = f"Budget of {budget:,} tokens" if budget else "Without a budget"
        of_task = pictures.setdefault(task, {})
        of_task.setdefault(row, []).append(studio.picture(name, size, description, draw, look=look))
    return pictures


def recall_pictures(found: Sequence[Cell], studio: Studio) -> list[Picture]:
    """A picture for each place: recall of each layer, with a row for each method and budget."""
    by_place = places(found)
    pictures = []
    for at, own in by_place.items():
        grid = charts.recall_grid(own)
        if grid is None:
            continue

        def draw(axis: Any, grid: charts.Grid = grid) -> None:
            charts.draw_heat_map(axis, grid)
            axis.set_xlabel("layer")

        title = place_name(at, by_place)
        label = f"Attention kept by each layer in percent, {title}: {_said(grid)}."
        pictures.append(studio.picture(title, charts.recall_size(grid), label, draw))
    return pictures


def map_pictures(found: Sequence[Cell], studio: Studio) -> dict[str, list[Picture]]:
    """The maps that lines store, by place and method; invalid ones are left out."""
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
                    charts.draw_selection_map(axis, kept, color=color)
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
    """The numbers of a heat map in words, row by row."""
    rows = []
    for name, values in zip(grid.rows, grid.values.tolist(), strict=True):
        texts = [NOTHING if math.isnan(v) else f"{100 * v:.0f}" for v in values]
        rows.append(f"{name}: {', '.join(texts)}")
    return "; ".join(rows)


#: Folder of the templates, the style sheet and the script.
_HERE = Path(__file__).parent
#: If there are more tables than this, they are folded.
_MOST_OPEN = 6
#: Prefix of methods that compress the cache of a prompt; see docs/kvpress.md.
_COMPRESSORS = "kvpress:"


def write_report(lines: list[Line], path: str | Path) -> None:
    """Writes the page for the lines of an evaluation; ConfigError without lines, or if it cannot be
    written.
    """
    save_page(render(lines), path)


def save_page(text: str, path: str | Path) -> None:
    """Writes a page; ConfigError if it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report {str(path)!r}: {why(error)}") from error


def environment() -> jinja2.Environment:
    """The environment of the templates; values are escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def render(lines: Sequence[Line], first: str = "") -> str:
    """The page as text; first: HTML sections that come before the others."""
    found = cells(lines)
    if not found:
        raise ConfigError("there are no lines to report; run `keyhole eval` first")
    style = method_styles((cell.policy, cell.name) for cell in found)
    studio = Studio(style)
    runs, run_of = runs_of([cell.line for cell in found])
    parts = [
        _part(terms, own, style, run_of_own, studio)
        for terms in dict.fromkeys(cell.place.terms for cell in found)
        for own, run_of_own in [_of_terms(terms, found, run_of)]
    ]
    used = {column.key for part in parts for table in part.tables for column in table.columns}
    days = sorted({date[:10] for run in runs for date in run.dates})
    models = list(dict.fromkeys(cell.place.model for cell in found))
    return (
        environment()
        .get_template("page.html")
        .render(
            first=Markup(first),
            style_sheet=Markup(style_sheet()),
            script=Markup(_text("page.js")),
            variable=lambda color: THEME[color][0],
            models=models,
            days=days,
            num_cells=len(found),
            tasks=len({cell.place.task for cell in found}),
            lengths=sorted({cell.place.length for cell in found if cell.place.length}),
            style=style,
            parts=parts,
            num_tables=sum(len(part.tables) for part in parts),
            has_cost=any(part.pareto for part in parts),
            controls=any(cell.comparison is not None for cell in found),
            most_open=_MOST_OPEN,
            needles=needle_pictures(found, studio),
            recalls=recall_pictures(found, studio),
            maps=map_pictures(found, studio),
            columns=[column for column in report_tables.COLUMNS if column.key in used],
            setups={
                at: SETUPS[at] for at in SETUPS if any(cell.place.setup == at for cell in found)
            },
            compressed=any(cell.policy.startswith(_COMPRESSORS) for cell in found),
            runs=runs,
        )
    )


@dataclass(frozen=True, kw_only=True)
class ReportPart:
    """Results under the same terms; the report never mixes terms.

    gains: the overview of gains, None without controls.
    """

    title: str
    about: str
    overview: Overview
    gains: Overview | None
    gain_pictures: list[Picture]
    pareto: list[Picture]
    tables: list[ReportTable]
    settings: dict[str, list[str]]


def _of_terms(
    terms: str, found: Sequence[Cell], run_of: Sequence[Run]
) -> tuple[list[Cell], list[Run]]:
    pairs = [pair for pair in zip(found, run_of, strict=True) if pair[0].place.terms == terms]
    return [cell for cell, _ in pairs], [run for _, run in pairs]


def _part(
    terms: str,
    found: Sequence[Cell],
    style: Styles,
    run_of: Sequence[Run],
    studio: Studio,
) -> ReportPart:
    gained = [cell for cell in found if cell.gain is not None]
    return ReportPart(
        title=TERMS_NAMES.get(terms, terms).capitalize(),
        about=TERMS.get(terms or "given", ""),
        overview=report_tables.overview(found, style),
        gains=report_tables.overview(gained, style, report_tables.GAIN) if gained else None,
        gain_pictures=gain_pictures(found, studio),
        pareto=pareto_pictures(found, studio),
        tables=report_tables.tables(found, style, run_of),
        settings=settings_by_name(found),
    )


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def style_sheet() -> str:
    """The theme as CSS variables, and the rules of the page."""
    day = "".join(f"--{name}: {light};" for name, light, _ in THEME.values())
    night = "".join(f"--{name}: {dark};" for name, _, dark in THEME.values())
    return (
        f":root {{ color-scheme: light dark; {day} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {night} }} }}\n" + _text("page.css")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page for a file of results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", help="JSON lines of `keyhole eval`")
    parser.add_argument("report", help="the HTML file to write")
    parsed = parser.parse_args(arguments)
    try:
        write_report(LineFile(parsed.results).lines, parsed.report)
    except KeyholeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

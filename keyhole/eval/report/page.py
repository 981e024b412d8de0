"""One HTML file about an evaluation: tables, pictures, and where every number comes from.

    python -m keyhole.eval.report.page RESULTS.jsonl REPORT.html

The file needs nothing else: no network, no other file. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from keyhole.errors import ConfigError, KeyholeError
from keyhole.eval.report import pictures
from keyhole.eval.report import tables as report_tables
from keyhole.eval.report.cells import (
    SETUPS,
    TERMS_NAMES,
    Cell,
    Line,
    Run,
    cells,
    read_lines,
    runs_of,
    settings_by_name,
)
from keyhole.eval.report.pictures import Picture
from keyhole.eval.report.plot_style import THEME, Look, looks
from keyhole.eval.report.tables import Overview, ReportTable
from keyhole.eval.settings import TERMS

#: Where the template, its style sheet and its script lie.
_HERE = Path(__file__).parent
#: So many tables are open when the page is opened; the others are a click away.
_MOST_OPEN = 6
#: Before the names of methods that make a prompt's cache smaller; see docs/kvpress.md.
_COMPRESSORS = "kvpress:"


def write_report(lines: list[Line], path: str | Path) -> None:
    """Writes the page of an evaluation's lines; ConfigError without lines, or if it cannot."""
    save_page(render(lines), path)


def save_page(text: str, path: str | Path) -> None:
    """Writes a page; ConfigError if it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report {str(path)!r}: {error}") from error


def environment() -> jinja2.Environment:
    """Where templates come from; what they are given is escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def render(lines: Sequence[Line], first: str = "") -> str:
    """The page as text; first: sections in HTML that stand before the others."""
    found = cells(lines)
    if not found:
        raise ConfigError("there are no lines to report; run `keyhole eval` first")
    style = looks((cell.policy, cell.name) for cell in found)
    studio = pictures.Studio(style)
    runs, run_of = runs_of(found)
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
            needles=pictures.needle_pictures(found, studio),
            recalls=pictures.recall_pictures(found, studio),
            maps=pictures.map_pictures(found, studio),
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
    """What was measured on the same terms; parts are never mixed.

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
    style: Mapping[str, Look],
    run_of: Sequence[Run],
    studio: pictures.Studio,
) -> ReportPart:
    gained = [cell for cell in found if cell.gain is not None]
    return ReportPart(
        title=TERMS_NAMES.get(terms, terms).capitalize(),
        about=TERMS.get(terms or "given", ""),
        overview=report_tables.overview(found, style),
        gains=report_tables.overview(gained, style, report_tables.GAIN) if gained else None,
        gain_pictures=pictures.gain_pictures(found, studio),
        pareto=pictures.pareto_pictures(found, studio),
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

"""One HTML file about an evaluation: tables, pictures, and where every number comes from.

    python -m keyhole.evaluate.report_page RESULTS.jsonl REPORT.html

The file needs nothing else: no network, no other file. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from keyhole.errors import ConfigError, KeyholeError
from keyhole.evaluate import report_pictures, report_runs, report_tables
from keyhole.evaluate.cells import SETUPS, Line, cells, read_lines
from keyhole.evaluate.looks import THEME, looks

#: Where the template, its style sheet and its script lie.
_HERE = Path(__file__).parent
#: So many tables are open when the page is opened; the others are a click away.
_MOST_OPEN = 6
#: Before the names of methods that make a prompt's cache smaller; see docs/kvpress.md.
_COMPRESSORS = "kvpress:"


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
    studio = report_pictures.Studio(style)
    runs, run_of = report_runs.runs(found)
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
        style_sheet=Markup(_variables() + _text("report_page.css")),
        script=Markup(_text("report_page.js")),
        variable=lambda color: THEME[color][0],
        models=models,
        days=days,
        num_cells=len(found),
        tasks=len({cell.place.task for cell in found}),
        lengths=sorted({cell.place.length for cell in found if cell.place.length}),
        style=style,
        overview=report_tables.overview(found, style),
        pareto=report_pictures.pareto_pictures(found, studio),
        tables=tables,
        most_open=_MOST_OPEN,
        needles=report_pictures.needle_pictures(found, studio),
        recalls=report_pictures.recall_pictures(found, studio),
        maps=report_pictures.map_pictures(found, studio),
        columns=[column for column in report_tables.COLUMNS if column.key in used],
        setups={at: SETUPS[at] for at in SETUPS if any(cell.place.setup == at for cell in found)},
        settings=report_runs.settings(found),
        compressed=any(cell.policy.startswith(_COMPRESSORS) for cell in found),
        runs=runs,
    )


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


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

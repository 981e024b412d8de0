"""The suite's tables and curves as one HTML file, and its curves as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from keyhole.drawing import STYLE, matplotlib, save
from keyhole.errors import ConfigError
from keyhole.eval.attention.report import pictures, table
from keyhole.eval.attention.report.summary import AttentionSetting, places
from keyhole.eval.report.inline_svg import SVG_STYLE, inline_svg
from keyhole.eval.report.page import style_sheet
from keyhole.eval.results.line_file import Line

_HERE = Path(__file__).parent


def write_page(lines: Sequence[Line], path: str | Path) -> None:
    """Writes the page of the suite's lines; ConfigError without lines, or if it cannot."""
    try:
        Path(path).write_text(render(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report {str(path)!r}: {error}") from error


def render(lines: Sequence[Line]) -> str:
    """The page as text."""
    found = places(lines)
    if not found:
        raise ConfigError("there are no lines to report; run `keyhole eval --suite attention`")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    shown = [
        {"title": table.title(place), "tables": table.tables(place), "pictures": _inline(place, i)}
        for i, place in enumerate(found)
    ]
    return environment.get_template("page.html").render(
        style_sheet=Markup(style_sheet()),
        model=", ".join(dict.fromkeys(place.model for place in found)),
        places=shown,
        how_to_read=table.HOW_TO_READ,
        run=_run(lines),
    )


def write_pictures(place: AttentionSetting, paths: dict[str, Path]) -> None:
    """Writes the pictures "loss" and "overlap" of a place; paths: by these names."""
    pyplot = matplotlib()[0]
    for drawing in pictures.drawings(place):
        with pyplot.rc_context(STYLE):
            figure = pyplot.figure(figsize=drawing.size, layout="constrained")
            drawing.draw(figure)
            save(figure, paths[drawing.name])
            pyplot.close(figure)


def _inline(place: AttentionSetting, number: int) -> list[Markup]:
    pyplot, found = matplotlib()[0], []
    for drawing in pictures.drawings(place):
        with pyplot.rc_context(SVG_STYLE):
            figure = pyplot.figure(figsize=drawing.size, layout="constrained")
            drawing.draw(figure)
            svg = inline_svg(figure, f"{drawing.name}{number}", drawing.label, titles={})
            pyplot.close(figure)
        # matplotlib escapes text, and inline_svg what it adds.
        found.append(Markup(svg))
    return found


def _run(lines: Sequence[Line]) -> dict[str, Any]:
    """Of the newest line, as all of one run have it in common."""
    last = lines[-1]
    machine, versions = last.get("machine", {}), last.get("versions", {})
    known = {
        "Measured": str(last.get("date", ""))[:10],
        "Command": last.get("command"),
        "Commit": last.get("commit"),
        "Machine": ", ".join(str(machine[name]) for name in ("cpu", "device") if name in machine),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Texts": last["texts"],
    }
    return {name: text for name, text in known.items() if text}

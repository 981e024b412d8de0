"""The pages of docs/results/ about right answers and their cost.

`python -m benchmarks.claims --render` writes them from the stored lines; a cell that was not
measured is a dash in a table and white in a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.results_page import (
    bundled_models,
    controls,
    controls_pictures,
    hops_figures,
    variations,
)
from benchmarks.results_page import scope as results_scope
from benchmarks.results_page.text import paragraph
from keyhole.eval.line_file import Line, LineFile

FOLDER = "results"
SCOPE = "dense-layers.jsonl"
_WRITTEN_BY = "<!-- Written by `python -m benchmarks.claims --render`; measure again instead. -->"


def write(results: Path, docs: Path) -> None:
    """Rewrites these pages and their figures; results: the folder of the lines."""
    claims = {name: stored(results / file) for name, file in controls.FILES.items()}
    for name, text in pages(stored(results / SCOPE), claims).items():
        (docs / FOLDER / name).write_text(text)
    controls_pictures.write(claims, docs / "images")


def stored(path: Path) -> list[Line]:
    """The lines of a file; none if it does not exist."""
    return LineFile(path).lines


def pages(
    scope: Sequence[Line] = (), claims: Mapping[str, Sequence[Line]] | None = None
) -> dict[str, str]:
    """File -> text of the pages that have lines.

    scope: the lines for `scope`. claims: the lines for `controls`, by part.
    """
    claims = claims or {}
    pictures = controls_pictures.names(claims)
    about = [
        *results_scope.section(scope),
        *bundled_models.tasks_section(claims.get("tell", ())),
        *bundled_models.layers_section(claims.get("layers", ())),
        *bundled_models.far_section(claims.get("far", ())),
    ]
    found = {"scope.md": ("What the models can and cannot tell", about)}
    for prefix, page in controls.PAGES.items():
        parts = controls.sections(page.terms, claims, pictures)
        if prefix:
            parts += hops_figures.sections(claims, pictures, prefix)
        else:
            parts += variations.sections(claims, pictures)
        intro = [paragraph(page.about)] if parts else []
        found[page.file] = page.title, [*intro, *parts]
    return {
        name: "\n\n".join([f"{_WRITTEN_BY}\n\n# {title}", *parts]) + "\n"
        for name, (title, parts) in found.items()
        if parts
    }

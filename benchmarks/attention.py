"""Writes the tables and figures of docs/attention.md from the stored lines.

    keyhole eval --suite attention --terms equal --lengths 2048 --limit 8 \
        --output benchmarks/results/attention.jsonl
    python -m benchmarks.attention

The second command measures nothing. It replaces the text between the two markers of the page.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks
from benchmarks.results_page.text import between, source, written
from keyhole.drawing import picture
from keyhole.eval.attention.pictures import drawings
from keyhole.eval.attention.tables import AttentionSetting, places, tables
from keyhole.eval.line_file import Line, LineFile

LINES = benchmarks.results() / "attention.jsonl"
PAGE = benchmarks.ROOT / "docs/attention.md"
IMAGES = PAGE.parent / "images"
PICTURES = {"loss": "attention-loss.png", "overlap": "attention-overlap.png"}
BEGIN, END = "<!-- attention: python -m benchmarks.attention -->\n", "<!-- end of attention -->"
_OVERLAP = "Overlap"


def main() -> None:
    """Writes the page and its figures."""
    lines = LineFile(LINES).lines
    if not lines:
        sys.exit(f"error: {LINES} holds no lines; the docstring says how they are measured")
    first = places(lines)[0]
    write_pictures(first, {name: IMAGES / file for name, file in PICTURES.items()})
    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, as_markdown(lines)))


def as_markdown(lines: Sequence[Line]) -> str:
    """All tables as Markdown; the overlap is shown once per length and budget."""
    parts, seen = [], set()
    for place in places(lines):
        parts.append(f"### {_title(place)}\n")
        for one in tables(place):
            if one.title.startswith(_OVERLAP):
                if (place.length, place.budget) in seen:
                    continue
                seen.add((place.length, place.budget))
            parts.append(f"{one.title}:\n\n{written(one.heads, one.rows, one.left)}\n")
    return "\n".join([*parts, measured(lines), ""])


def measured(lines: Sequence[Line]) -> str:
    """How many texts were read, machine, date and command of the measurement."""
    texts = {line["samples"] for line in lines if line["weights"] == "trained"}
    twins = {line["samples"] for line in lines if line["weights"] == "random"}
    read = f"{_numbers(texts)} texts, of which the random twin read {_numbers(twins)}."
    return f"{read}\n\n{source(lines)}"


def _title(place: AttentionSetting) -> str:
    return f"{place.length:,} tokens, budget {place.budget:,}, {place.terms} terms"


def _numbers(values: set[int]) -> str:
    return " or ".join(map(str, sorted(values)))


def write_pictures(place: AttentionSetting, paths: dict[str, Path]) -> None:
    """Writes the figures "loss" and "overlap" to the paths given under these names."""
    for drawing in drawings(place):
        path = paths[drawing.name]
        with picture(path, figsize=drawing.size, layout="constrained") as figure:
            drawing.draw(figure)


if __name__ == "__main__":
    main()

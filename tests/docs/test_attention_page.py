"""The tables of docs/attention.md are those of the stored lines."""

from __future__ import annotations

from pathlib import Path

from benchmarks import attention
from benchmarks.results_page.text import between
from keyhole.eval.line_file import LineFile

ROOT = Path(__file__).parents[2]


def test_the_tables_are_the_stored_ones() -> None:
    text = (ROOT / "docs/attention.md").read_text()
    lines = LineFile(ROOT / "benchmarks/results/attention.jsonl").lines
    assert between(text, attention.BEGIN, attention.END, attention.as_markdown(lines)) == text, (
        "run python -m benchmarks.attention"
    )


def test_its_pictures_are_there() -> None:
    text = (ROOT / "docs/attention.md").read_text()
    for name in attention.PICTURES.values():
        assert f"(images/{name})" in text
        assert (attention.IMAGES / name).stat().st_size > 10_000

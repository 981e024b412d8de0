"""The table in docs/evaluation.md says what the stored lines say."""

from __future__ import annotations

from pathlib import Path

from keyhole.cli.common import terminal
from keyhole.eval.comparisons import controls_table
from keyhole.eval.line_file import LineFile

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("task", "ms", "note")


def shown() -> str:
    """What `keyhole eval` printed, without the columns that the page leaves out."""
    found = controls_table(
        LineFile(ROOT / "benchmarks" / "results" / "eval-controls.jsonl").lines, ()
    )
    kept = [index for index, head in enumerate(found.heads) if head not in LEFT_OUT]
    rows = [[row[index] for index in kept] for row in found.rows]
    return terminal.table([found.heads[index] for index in kept], rows)


def test_the_example_of_the_page_is_what_was_measured() -> None:
    assert shown() in (ROOT / "docs" / "evaluation.md").read_text()

"""Generated documents know every command, every policy and every reuse method."""

from __future__ import annotations

import pytest

from benchmarks.reference_pages import render, with_differences
from keyhole.cli import COMMANDS
from keyhole.cli.documents import ACTIONS
from keyhole.policies import available_policies
from keyhole.policies.prefill import available_prefill_policies
from keyhole.reuse import available_reuse_methods
from tests.docs.markdown import DOCS, num_cells, table_rows


def test_every_command_and_method_has_its_section() -> None:
    documents = render()
    for command in COMMANDS:
        assert f"\n## keyhole {command}\n" in documents["docs/cli.md"]
    for action in ACTIONS:
        assert f"\n### keyhole documents {action}\n" in documents["docs/cli.md"]
    tables = available_policies(), available_prefill_policies(), available_reuse_methods()
    for name, cls in [pair for table in tables for pair in table.items()]:
        assert f"\n## {name}\n" in documents["docs/methods.md"]
        assert f"`{cls.__name__}`" in documents["docs/methods.md"]


def test_the_terminal_does_not_change_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    narrow = render()
    monkeypatch.setenv("COLUMNS", "200")
    assert render() == narrow


ABOUT = """An idea.

Differences (theirs | ours | effect measured):
- a choice per query head | per KV head, by the largest score
  among its query heads | 62.5 % (48.4 to 74.8) against
  60.4 %
- none | one | not measured: costs nothing

The end."""


def test_differences_are_a_table_of_three_columns() -> None:
    assert with_differences(ABOUT) == (
        "An idea.\n\n**Differences**\n\n"
        "| theirs | ours | effect measured |\n|---|---|---|\n"
        "| a choice per query head | per KV head, by the largest score among its query heads "
        "| 62.5 % (48.4 to 74.8) against 60.4 % |\n"
        "| none | one | not measured: costs nothing |\n\n"
        "The end."
    )
    assert with_differences("An idea.\n\nNo more.") == "An idea.\n\nNo more."


@pytest.mark.parametrize("rows", ["", "- a | b", "- a | b | c | d"])
def test_a_difference_without_three_cells_is_refused(rows: str) -> None:
    with pytest.raises(AssertionError):
        with_differences(f"Differences (theirs | ours | effect measured):\n{rows}")


def uneven(text: str) -> list[str]:
    """Lines of tables that have not as many cells as the heads above them."""
    return [
        row for rows in table_rows(text) for row in rows if num_cells(row) != num_cells(rows[0])
    ]


def test_every_row_of_a_table_has_as_many_cells_as_its_heads() -> None:
    """The docstring of ShadowKV has two paragraphs, and its row was a line and a half."""
    documents = render()
    assert len(table_rows(documents["docs/methods.md"])) > len(available_policies())
    for name, text in documents.items():
        assert not uneven(text), name
    for page in [DOCS.parent / "README.md", *DOCS.glob("*.md")]:
        assert not uneven(page.read_text()), page.name


def test_a_broken_row_is_seen() -> None:
    heads = "| a | b |\n|---|---|\n"
    assert uneven(f"{heads}| 1 | 2 |\n| 3 \\| 4 | 5 |\n") == []
    assert uneven(f"{heads}| 1 | 2 | 3 |\n") == ["| 1 | 2 | 3 |"]
    assert uneven(f"{heads}| 1 | two\nlines |\n") == ["| 1 | two", "lines |"]

"""The page of the Python API works as it stands, and its tables are those of the program."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from benchmarks import reference_pages
from keyhole.config import SamplingParams
from keyhole.llm import LLM
from tests.docs.markdown import DOCS, blocks

TEXT = (DOCS / "python-api.md").read_text()


def test_its_code_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for code in blocks("python-api.md", "python"):
        exec(code, names)
    assert "max_tokens 0 must be" in capsys.readouterr().out


def test_its_tables_are_up_to_date() -> None:
    assert reference_pages.with_settings(TEXT) == TEXT, "run `make reference`"
    for field in dataclasses.fields(SamplingParams):
        assert f"| `{field.name}` | " in TEXT


def test_a_stale_table_is_replaced() -> None:
    first, _, rest = TEXT.partition("| `max_tokens` |")
    stale = first + "| `most_tokens` |" + rest
    assert stale != TEXT
    assert reference_pages.with_settings(stale) == TEXT


def test_every_argument_of_a_model_is_described() -> None:
    """Three ran into the line before, and one was missing."""
    described = re.findall(r"^    (\w+): ", inspect.getdoc(LLM) or "", re.MULTILINE)
    arguments = [*inspect.signature(LLM).parameters]
    assert sorted(set(arguments) - set(described)) == []

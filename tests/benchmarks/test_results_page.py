"""The pages of docs/results/ about right answers, from made-up lines and from the stored ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks import results_page
from benchmarks.results_page import controls
from benchmarks.results_page import scope as results_scope
from tests.eval import eval_lines

ROOT = Path(__file__).parents[2]


def line(policy: str, budget: int | None, right: int, **fields: Any) -> dict[str, Any]:
    """A line of ten samples, the first of them right."""
    found = {
        "policy": policy,
        "method": policy,
        "budget": budget,
        "settings": {} if budget is None else {"token_budget": budget},
        "task": "tiny_derive",
        "setup": "prompt",
        "samples": 10,
        "scores": [1.0] * right + [0.0] * (10 - right),
        "score": right / 10,
        "depths": None,
        "versions": {"torch": "2", "transformers": "5"},
    }
    return eval_lines.line(**(found | fields))


@pytest.mark.slow
def test_the_pages_are_those_of_the_stored_lines() -> None:
    results, docs = benchmarks.results(), ROOT / "docs"
    scope = results_page.stored(results / results_page.SCOPE)
    claims = {name: results_page.stored(results / file) for name, file in controls.FILES.items()}
    pages = results_page.pages(scope, claims)
    assert len(pages) == 4
    for name, text in pages.items():
        assert (docs / results_page.FOLDER / name).read_text() == text, (
            "run `python -m benchmarks.claims --render`"
        )


def test_the_page_opens_with_what_the_model_cannot_tell() -> None:
    settings = {"full_layers": [0, 1], "delta_layers": [2], "recent_pages": 4}
    scope = [
        line("full", None, 10),
        line("delta", 64, 10, settings=settings),
        line("quest", 64, 0, settings={"full_layers": []}),
        line("streaming_llm", 64, 10, settings={"full_layers": [0], "sink_size": 4}),
        line("omnikv", 64, 0, settings={"filter_layers": [2], "window_size": 16}),
    ]
    text = results_page.pages(scope)["scope.md"]
    assert "# What the models can and cannot tell\n\n## What `tiny`" in text
    table = text.split("what a configuration loses")[0].splitlines()
    (delta,) = (row for row in table if "| `delta` |" in row)
    (quest,) = (row for row in table if "| `quest` |" in row)
    # All of the budget is the newest four pages: nothing is chosen. Wilson's interval of 10 of 10.
    assert delta == "| `tiny_derive` | `delta` | 0, 1, 2 | 64 | 64 | 0 | 100 | 72.2 to 100 |"
    assert quest == "| `tiny_derive` | `quest` | none | 64 | 16 | 48 | 0 | 0 to 27.8 |"
    # Newest tokens and chosen ones: a window without a choice, and one inside of the budget.
    assert "| `streaming_llm` | 0 | 64 | 60 | 0 | 100 |" in text
    assert "| `omnikv` | 2 | 64 | 16 | 48 | 0 |" in text
    assert results_scope.section([]) == []


def test_a_page_without_lines_is_not_written(tmp_path: Path) -> None:
    (tmp_path / results_page.FOLDER).mkdir()
    results_page.write(tmp_path, tmp_path)
    assert not [*(tmp_path / results_page.FOLDER).iterdir()]

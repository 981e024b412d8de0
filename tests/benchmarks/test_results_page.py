"""The pages of docs/results/ about right answers, from made-up lines and from the stored ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks
from benchmarks import results_page
from benchmarks.results_page import controls
from benchmarks.results_page import errors as results_errors
from benchmarks.results_page import pictures as results_pictures
from benchmarks.results_page import scope as results_scope
from benchmarks.results_page.cells import (
    ASKED,
    cheapest_as_right,
    dense_layers,
    gain_over_fixed,
    of_task,
)
from keyhole.eval.policy_trace import SelectionMap
from tests.eval import eval_lines

ROOT = Path(__file__).parents[2]
DATE = "2026-11-23T00:00:00+00:00"


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
        "tokens_generated": 500.0,
        "bytes_per_step": 1024.0 * (budget or 2048),
        "cpu_seconds": 36.0,
        "depths": None,
        "versions": {"torch": "2", "transformers": "5"},
    }
    return eval_lines.line(**(found | fields))


def lines() -> list[dict[str, Any]]:
    return [
        line("full", None, 10),
        line("delta", 128, 9, tokens_generated=510.0, date=DATE),
        line("delta", 256, 10),
        line("quest", 128, 3),
        line("delta", 512, 10, settings={"token_budget": 512, "recall": 0.9}, bytes_per_step=2e5),
        line("full", None, 8, length=2048, samples=10),
        line("somebody", 64, 5, task="tiny_recall", setup="question"),
        line("delta", 128, 1, task="passkey"),
    ]


def wrong(method: str, **fields: Any) -> dict[str, Any]:
    """A line about one wrong answer."""
    shares = np.zeros((4, 12), np.uint8)
    kept = SelectionMap(shares=shares, layer=0, prompt_tokens=8, steps=4, marks=(2, 3))
    one = {"seed": 4, "word": 7, "right": "a is 1", "written": "a is 2", "tokens_back": 40}
    found = [one | {"kind": "copied", "step": 6, "read": 0.25, "read_before": 0.75}]
    about = {"wrong": 7, "found": found, "map": kept.to_json(), "map_step": 2, "date": DATE}
    return line(method, 128, 3, **(about | fields))


def rows(text: str, title: str) -> dict[str, list[str]]:
    """The first table behind a title, by its first cell."""
    behind = text.split(title)[1]
    table = behind[behind.index("|") :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    return {first: rest for first, *rest in cells}


@pytest.mark.slow
def test_the_page_and_its_pictures_are_those_of_the_stored_lines() -> None:
    results, docs = benchmarks.results(), ROOT / "docs"
    found = results_page.stored(results / results_page.LINES)
    errors = results_page.stored(results / results_page.ERRORS)
    scope = results_page.stored(results / results_page.SCOPE)
    claims = {name: results_page.stored(results / file) for name, file in controls.FILES.items()}
    again = "run `python -m benchmarks.evaluation --render`"
    pages = results_page.pages(found, errors, scope, claims)
    assert len(pages) == 5
    for name, text in pages.items():
        assert (docs / results_page.FOLDER / name).read_text() == text, again
    date = results_page.newest([*found, *errors]).encode()
    cells = results_page.measured(found)
    for name in results_pictures.names(cells, errors).all:
        assert date in (docs / "images" / name).read_bytes(), again


def test_what_was_not_measured_is_a_dash_and_not_a_nought() -> None:
    text = results_page.pages(lines())["configurations.md"]
    scores = rows(text, "Right answers, %:")
    # The longer text has full attention alone, and a column for each budget below its length.
    assert scores[""] == ["1,024: 128", "256", "2,048: 64", "128", "256", "512", "1,024"]
    assert scores["`full`"] == ["100", "100"] + ["80"] * 5
    assert scores["`delta`"] == ["90", "100"] + ["–"] * 5
    assert scores["`quest`"] == ["30"] + ["–"] * 6
    assert rows(text, "(below 1: answers stop early):")["`delta`"][:2] == ["1.02", "1.00"]
    assert rows(text, "reads in order to select:")["`delta`"][:2] == ["128", "256"]
    assert "10 at 1,024 tokens, 10 at 2,048 tokens" in " ".join(text.split())
    assert "passkey" not in text
    assert "`somebody`" in text.split(ASKED["tiny_recall"].title)[1]


def test_the_page_opens_with_what_the_model_cannot_tell() -> None:
    settings = {"full_layers": [0, 1], "delta_layers": [2], "recent_pages": 4}
    scope = [
        line("full", None, 10),
        line("delta", 64, 10, settings=settings),
        line("quest", 64, 0, settings={"full_layers": []}),
        line("streaming_llm", 64, 10, settings={"full_layers": [0], "sink_size": 4}),
        line("omnikv", 64, 0, settings={"filter_layers": [2], "window_size": 16}),
    ]
    text = results_page.pages(lines(), [], scope)["scope.md"]
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


def test_nothing_is_said_to_be_shown_by_unequal_configurations() -> None:
    """The page had "+91.0 points to `quest`, wanted > 0", which measured the dense layers."""
    text = results_page.pages(lines())["configurations.md"]
    assert "wanted" not in text
    assert "points to `quest`" not in text
    assert "# Configurations as of November 2026" in text


def test_configurations_come_from_the_stored_settings() -> None:
    settings = {"token_budget": 256, "recent_pages": 2, "full_layers": [0], "delta_layers": [1]}
    found = results_page.measured(
        [line("delta", 256, 1, settings=settings, length=2048), line("raas", 256, 1, length=2048)]
    )
    told = results_scope.configurations(found, 256, 2048).splitlines()[2:]
    assert sorted(told) == ["| `delta` | 0, 1 | `recent_pages` 2 |", "| `raas` | none | – |"]
    assert results_scope.configurations(found, 64, 2048) == ""
    assert dense_layers({"full_layers": None, "selection_layers": [4, 2]}) == [2, 4]


def test_an_adaptive_budget_is_compared_at_its_bytes() -> None:
    found = results_page.measured(lines())
    (cell,) = (cell for cell in found if cell.name == "delta, adaptive")
    low, high = math.log2(128 * 1024), math.log2(256 * 1024)
    curve = 0.9 + 0.1 * (math.log2(2e5) - low) / (high - low)
    assert gain_over_fixed(cell, found) == pytest.approx(1 - curve)
    assert cheapest_as_right(cell, found) == 256 * 1024
    text = results_page.pages(lines())["configurations.md"]
    prose = " ".join(text.split())
    assert "1 lie on or above the curve, 0 below" in prose
    assert "In 0 of 1 a fixed budget has as many right answers for fewer bytes" in prose


def test_errors_say_what_was_read() -> None:
    nowhere = {"kind": "computed", "tokens_back": None, "read": None, "read_before": None}
    other = wrong("raas")["found"][0] | nowhere
    found = [wrong("quest", wrong=1), wrong("quest"), wrong("raas", found=[other], map=None)]
    text = results_page.pages(lines(), found)["configurations.md"]
    by_method = rows(text, "## Where a configuration fails")
    numbers = ["1,024", "128", "7 of 10", "1"]
    assert by_method["`quest`"][1:] == [*numbers, "1, 0", "40", "25 %", "75 %"]
    assert by_method["`raas`"][1:] == [*numbers, "0, 1", "–", "–", "–"]
    assert "writes “a is 2” for “a is 1”, which stands 40 tokens back; the step read 25%" in text
    assert results_errors.section([], None) == []


@pytest.mark.slow
def test_page_and_pictures_are_written_again(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    folder = docs / results_page.FOLDER
    folder.mkdir(parents=True)
    results_page.write(tmp_path, docs)
    assert not [*folder.iterdir()]  # no line yet
    for name, found in (
        (results_page.LINES, lines()),
        (results_page.ERRORS, [wrong("quest"), wrong("raas")]),
    ):
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in found))
    results_page.write(tmp_path, docs)
    text = (folder / "configurations.md").read_text()
    pictures = sorted((docs / "images").iterdir())
    assert [picture.name for picture in pictures] == [
        "evaluation-derive.png",
        "evaluation-errors.png",
        "evaluation-recall.png",
        "evaluation.png",
    ]
    for picture in pictures:
        assert f"(../images/{picture.name})" in text
        assert DATE.encode() in picture.read_bytes()


def test_a_heat_map_leaves_open_what_was_not_measured() -> None:
    own = of_task(results_page.measured(lines()), "tiny_derive")
    grid = results_pictures.score_grid(own)
    assert grid.rows == ("full", "quest", "delta")
    assert grid.columns[:3] == ("128\nof 1,024", "256", "64\nof 2,048")
    np.testing.assert_array_equal(grid.values[1], [0.3] + [np.nan] * 6)

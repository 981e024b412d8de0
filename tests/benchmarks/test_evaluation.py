"""The grid of benchmarks/evaluation.py, and that a run goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

import keyhole
from benchmarks import evaluation
from benchmarks.results_page.cells import ASKED, BUDGETS
from benchmarks.results_page.first_error import FirstError
from keyhole.eval.line_file import LineFile
from keyhole.eval.methods import FULL, Budget, Method
from keyhole.eval.policy_trace import Recorded, Trace
from keyhole.models.loading import load
from keyhole.policies import available_policies


def test_the_grid_has_every_policy_at_every_budget_smaller_than_the_length() -> None:
    found = {
        (cell.task, cell.length, cell.method.name, cell.tokens)
        for cell in evaluation.grid()
        if "recall" not in cell.method.settings
    }
    assert found == {
        (task, length, name, budget)
        for task in ASKED
        for length in (1024, 2048, 4096, 8192)
        for name in available_policies()
        for budget in ([None] if name == "full" else [b for b in BUDGETS if b < length])
    }


def test_every_cell_occurs_once_and_full_attention_first() -> None:
    cells = evaluation.grid()
    assert len({cell.known_by for cell in cells}) == len(cells)
    parts = [cell.part for cell in cells]
    assert parts == sorted(parts)
    seen = set()
    for cell in cells:
        if cell.method is FULL:
            seen.add((cell.task, cell.length))
        assert (cell.task, cell.length) in seen


def test_adaptive_budgets_are_taken_by_their_policies() -> None:
    geometry = load(keyhole.tiny(), "cpu").geometry(16)
    found = [cell for cell in evaluation.grid() if "recall" in cell.method.settings]
    assert {(cell.method.name, cell.method.settings["recall"]) for cell in found} >= {
        (name, recall) for name in ("delta", "spe_context") for recall in (0.9, 0.95, 0.99)
    }
    for cell in found:
        cell.method.policy(cell.length, 16).resolve(geometry)


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = load(keyhole.tiny(), "cpu"), tmp_path / "a.jsonl"
    window = Method(label="sliding_window", name="sliding_window", budget=Budget.parse("64"))
    cells = [
        evaluation.GridCell(part=1, task="tiny_derive", length=256, method=method, samples=2)
        for method in (FULL, window)
    ]
    assert evaluation.run(model, cells, LineFile(path), 0.0, "") == []
    first = evaluation.run(model, cells[:1], LineFile(path), 60.0, "")
    assert "1 of 1 cells" in evaluation.plan(cells[1:], LineFile(path))
    both = evaluation.run(model, cells, LineFile(path), 60.0, "a note")
    assert both[0] == first[0]
    assert LineFile(path).lines == both
    assert [line["note"] for line in both] == ["", "a note"]
    assert both[0]["score"] == 1.0
    assert both[1]["score"] == 0.0
    assert both[1]["cpu_seconds"] >= 0
    assert "0 cells, 0.0 h" in evaluation.plan(cells, LineFile(path))
    assert "time limit reached" in capsys.readouterr().err


def test_prompts_are_read_with_a_head_if_a_cell_wants_one() -> None:
    head = Method(label="spe_context", name="spe_context", budget=Budget.parse("64"))
    window = Method(label="sliding_window", name="sliding_window", budget=Budget.parse("64"))
    cells = [
        evaluation.GridCell(part=1, task="tiny_derive", length=length, method=method, samples=2)
        for length in (256, 512)
        for method in (FULL, window, head)
    ]
    found = evaluation.readers_first(cells, [])
    assert [cells.index(cell) for cell in found] == [2, 0, 1, 5, 3, 4]
    line = {"task": "tiny_derive", "length": 256, "method": head.label, "budget": 64, "samples": 2}
    found = evaluation.readers_first(cells, [line])
    assert [cells.index(cell) for cell in found] == [0, 1, 2, 5, 3, 4]


def test_an_answer_that_is_wrong_from_its_first_word_has_no_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill wrote that word, so no layer was sparse, and a map of layer None stopped the run."""
    line = dict.fromkeys(("setup", "settings", "fingerprint", "method", "samples"))
    line |= {"task": "tiny_derive", "length": 256, "policy": "sliding_window", "budget": 32}
    nothing = dict.fromkeys(("needed", "tokens_back", "step", "read", "read_before"))
    first = FirstError(
        seed=7,
        word=0,
        right="a",
        written="b",
        kind="copied",
        sparse_layers=(),
        recorded=Recorded(Trace([]), 256),
        **nothing,
    )
    monkeypatch.setattr(evaluation, "_wrong", lambda _: [(line, [7])])
    monkeypatch.setattr(evaluation.first_error, "find", lambda *_, **__: first)
    model, file = load(keyhole.tiny(), "cpu"), LineFile(tmp_path / "a.jsonl")
    (found,) = evaluation.examine_errors(model, file, LineFile(tmp_path / "errors.jsonl"), "")
    assert [one["seed"] for one in found["found"]] == [7]
    assert "map" not in found


@pytest.mark.slow
def test_wrong_answers_are_looked_into_once(tmp_path: Path) -> None:
    model, file = load(keyhole.tiny(), "cpu"), LineFile(tmp_path / "a.jsonl")
    window = Method(label="sliding_window", name="sliding_window", budget=Budget.parse("32"))
    cells = [
        evaluation.GridCell(part=1, task="tiny_derive", length=256, method=method, samples=2)
        for method in (FULL, window)
    ]
    evaluation.run(model, cells, file, 60.0, "")
    errors = LineFile(tmp_path / "errors.jsonl")
    (line,) = evaluation.examine_errors(model, file, errors, "")
    assert line["seeds"] == [0, 1]
    assert [one["seed"] for one in line["found"]] == [0, 1]
    assert line["map"]["layer"] == 0
    assert evaluation.examine_errors(model, file, errors, "") == []

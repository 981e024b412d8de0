"""The order of cells, what is measured once, what is refused, and that nothing is left behind."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest

from keyhole.config import EngineConfig
from keyhole.engine.core import Engine
from keyhole.errors import CapacityError
from keyhole.evaluate.eval_methods import Budget, Method, methods
from keyhole.evaluate.eval_run import Evaluation, Grid, Outcome
from keyhole.evaluate.eval_table import table
from keyhole.evaluate.line_file import LineFile
from keyhole.evaluate.workload import MakeEngine, Workload
from keyhole.models.loading import Model
from keyhole.policy.base import Policy

WINDOW = Method(label="sliding_window", name="sliding_window")
OTHER = Method(label="streaming_llm", name="streaming_llm")


class Noted(Workload):
    """Makes engines without running them, and notes what it was asked for."""

    def __init__(self, name: str, *, has_question: bool = True, fails: str = "") -> None:
        self.name, self.settings, self.has_question = name, {}, has_question
        self.asked: list[tuple[Any, ...]] = []
        self.engines: list[weakref.ref[Engine]] = []
        self.fails = fails

    def available(self, length: int, limit: int) -> int:
        return min(limit, 5)

    def measure(
        self, make_engine: MakeEngine, policy: Policy, length: int, setup: str, samples: int
    ) -> dict[str, Any]:
        alive = [engine for engine in self.engines if engine() is not None]
        self.asked.append((length, setup, policy.name, samples, len(alive)))
        self.engines.append(weakref.ref(make_engine(policy)))
        if policy.name == self.fails:
            raise CapacityError("memory is out")
        return {"score": 0.25 * len(self.asked)}

    def beside(self, found: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
        return {"full": full["score"]}


def run(model: Model, path: Path, *workloads: Noted, budgets: str = "32", **more: Any) -> Outcome:
    parsed = [Budget.parse(text) for text in budgets.split(",")]
    grid = Grid(
        workloads=workloads,
        lengths=more.get("lengths", (64,)),
        setups=more.get("setups", ("question", "prompt")),
        methods=methods([WINDOW, OTHER], parsed),
        samples=more.get("samples", 8),
        config=EngineConfig(),
    )
    return Evaluation(model, grid, LineFile(path), lambda: {"date": "today"}).run()


def test_full_attention_is_first_in_each_group(model: Model, tmp_path: Path) -> None:
    asked, forced = Noted("asked"), Noted("forced", has_question=False)
    found = run(model, tmp_path / "a", asked, forced, lengths=(64, 128))
    names = ["full", "sliding_window", "streaming_llm"]
    cells = [(n, s, p, 5) for n in (64, 128) for s in ("question", "prompt") for p in names]
    assert [call[:4] for call in asked.asked] == cells
    assert [call[:4] for call in forced.asked] == [c for c in cells if c[1] == "prompt"]
    assert [line["full"] for line in found.lines[:3] if "full" in line] == [0.25, 0.25]
    assert "full" not in found.lines[0]
    assert found.lines == LineFile(tmp_path / "a").lines


def test_no_engine_outlives_its_cell(model: Model, tmp_path: Path) -> None:
    """Its cache was still there when the next one asked how much memory is free."""
    work = Noted("asked")
    run(model, tmp_path / "a", work)
    assert {call[4] for call in work.asked} == {0}


def test_budgets_that_come_to_the_same_are_measured_once(model: Model, tmp_path: Path) -> None:
    work = Noted("forced", has_question=False)
    found = run(model, tmp_path / "a", work, budgets="32,1/2,0.6")
    assert len(work.asked) == len(found.lines) == 3
    assert found.stored == 0
    found = run(model, tmp_path / "a", work, budgets="32,16")
    assert len(work.asked) == len(found.lines) == 5
    assert found.stored == 3


def test_a_model_is_known_by_its_weights_not_its_name(model: Model, tmp_path: Path) -> None:
    work = Noted("forced", has_question=False)
    run(model, tmp_path / "a", work)
    found = run(dataclasses.replace(model, name="renamed"), tmp_path / "a", work)
    assert found.stored == 3


@pytest.mark.parametrize("fails", ["full", "streaming_llm"])
def test_a_cell_that_cannot_be_is_told_beside_the_others(
    model: Model, tmp_path: Path, fails: str
) -> None:
    """Where full attention cannot be, nobody else stands for it."""
    work = Noted("forced", has_question=False, fails=fails)
    found = run(model, tmp_path / "a", work)
    done = [name for name in ("full", "sliding_window", "streaming_llm") if name != fails]
    assert [line["policy"] for line in found.lines] == done
    assert ["full" in line for line in found.lines] == [False, fails != "full"]
    assert [one["error"] for one in found.refused] == ["memory is out"]
    shown = table(found.lines, found.refused, str)
    assert [row[shown.left + 1] == "refused" for row in shown.rows] == [False, False, True]
    assert shown.rows[-1][1] == fails
    assert shown.common == "length 64 tokens, setup prompt, samples 5"
    # What failed is tried again, and only that.
    work.fails = ""
    again = run(model, tmp_path / "a", work)
    assert again.stored == 2
    assert len(again.lines) == 3

"""The order of cells, what is measured once, what is refused, and that nothing is left behind."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import EngineConfig
from keyhole.engine.engine import Engine
from keyhole.errors import CapacityError
from keyhole.eval.comparisons import results_table
from keyhole.eval.line_file import EvalOutcome, LineFile
from keyhole.eval.methods import Budget, Method, under_budgets
from keyhole.eval.policy_trace import SelectionMap, mapped_layers
from keyhole.eval.run import EvalGrid, Evaluation
from keyhole.eval.workload import MakeEngine, Request, Shown, Workload
from keyhole.models.model import Model
from keyhole.policies.base import Policy

WINDOW = Method(label="sliding_window", name="sliding_window")
OTHER = Method(label="streaming_llm", name="streaming_llm")


class Noted(Workload):
    """Makes engines without running them, and notes what it was asked for."""

    def __init__(self, name: str, *, has_question: bool = True, fails: str = "") -> None:
        self.name, self.settings, self.has_question = name, {}, has_question
        self.asked: list[tuple[Any, ...]] = []
        self.engines: list[weakref.ref[Engine]] = []
        self.mapped: list[tuple[int, str]] = []
        self.answer = 3
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

    def shown(self, length: int, setup: str) -> Shown:
        prompt = [3 + n % 50 for n in range(length - 20)]
        self.mapped.append((length, setup))
        return Shown(Request(prompt=prompt, given=[5, 6], max_tokens=self.answer), (7,))

    def beside(self, found: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
        return {"full": full["score"]}


def run(
    model: Model, path: Path, *workloads: Noted, budgets: str = "32", **more: Any
) -> EvalOutcome:
    parsed = [Budget.parse(text) for text in budgets.split(",")]
    grid = EvalGrid(
        workloads=workloads,
        lengths=more.get("lengths", (64,)),
        setups=more.get("setups", ("question", "prompt")),
        methods=under_budgets([WINDOW, OTHER], parsed),
        samples=more.get("samples", 8),
        config=EngineConfig(),
        maps=more.get("maps", False),
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
def test_an_impossible_cell_is_reported_with_the_others(
    model: Model, tmp_path: Path, fails: str
) -> None:
    """Where full attention cannot be, nobody else stands for it."""
    work = Noted("forced", has_question=False, fails=fails)
    found = run(model, tmp_path / "a", work)
    done = [name for name in ("full", "sliding_window", "streaming_llm") if name != fails]
    assert [line["policy"] for line in found.lines] == done
    assert ["full" in line for line in found.lines] == [False, fails != "full"]
    assert [one["error"] for one in found.refused] == ["memory is out"]
    shown = results_table(found.lines, found.refused, str)
    assert [row[shown.left + 1] == "refused" for row in shown.rows] == [False, False, True]
    assert shown.rows[-1][1] == fails
    assert shown.title == "length 64 tokens, setup prompt, samples 5"
    # What failed is tried again, and only that.
    work.fails = ""
    again = run(model, tmp_path / "a", work)
    assert again.stored == 2
    assert len(again.lines) == 3


def test_maps_are_of_sparse_policies_under_their_first_budget(model: Model, tmp_path: Path) -> None:
    work = Noted("asked")
    more: dict[str, Any] = {"maps": True, "budgets": "32,16", "setups": ("prompt",)}
    found = run(model, tmp_path / "a", work, **more)
    assert [
        (line["policy"], line["budget"]) for line in found.lines if "selection_maps" in line
    ] == [
        ("sliding_window", 32),
        ("streaming_llm", 32),
    ]
    assert work.mapped == [(64, "prompt")] * 2
    maps = [SelectionMap.from_json(one) for one in found.lines[1]["selection_maps"]]
    assert [one.layer for one in maps] == [0, 1, 2, 3]
    for one in maps:
        # Two given tokens and two of three generated ones; a window of 32 tokens in each step.
        assert (one.prompt_tokens, one.steps, one.marks) == (44, 4, (7,))
        read = [[c for c in range(48) if row[c]] for row in one.shares.tolist()]
        assert read == [list(range(n - 31, n + 1)) for n in range(44, 48)]
    again = run(model, tmp_path / "a", work, **more)
    assert again.lines == found.lines
    assert len(work.mapped) == 2


def test_maps_are_added_to_what_was_measured_without_them(model: Model, tmp_path: Path) -> None:
    work = Noted("asked")
    run(model, tmp_path / "a", work, setups=("prompt",))
    work.answer = 1
    found = run(model, tmp_path / "a", work, setups=("prompt",), maps=True)
    assert (len(work.asked), len(work.mapped), found.stored) == (3, 2, 3)
    assert [line["score"] for line in found.lines] == [0.25, 0.5, 0.75]
    assert len(found.lines[1]["selection_maps"]) == 4
    # Results with maps also serve a call that does not want maps.
    assert run(model, tmp_path / "a", work, setups=("prompt",)).lines == found.lines
    assert len(LineFile(tmp_path / "a").lines) == 3 + 2


def test_layers_of_maps_follow_each_quarter() -> None:
    cases: list[tuple[list[int | None], tuple[int, ...]]] = [
        ([None] * 36, (8, 17, 26, 35)),
        ([None] * 4, (0, 1, 2, 3)),
        ([None] * 2, (0, 1)),
        ([None], (0,)),
        ([8, None] * 6, (3, 5, 9, 11)),
        ([8, 8], ()),
    ]
    for windows, wanted in cases:
        shape = {"num_kv_heads": 1, "key_dim": 4, "value_dim": 4}
        layers = tuple(LayerLayout(window=window, **shape) for window in windows)
        geometry = Geometry(layers=layers, num_query_heads=1, page_size=16, itemsize=4)
        assert mapped_layers(geometry) == wanted

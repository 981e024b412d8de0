"""What is tried: as many trials for all, one number of dense layers, and nothing impossible."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from typing import Any

import pytest

from keyhole.eval.methods import Budget, Method
from keyhole.eval.suite import SPACE, Chosen, Share, best_trial, combinations, dense_sets, trials
from keyhole.policies import available_policies, make_policy
from tests.policies.shapes import shape

GEOMETRY = shape(12)
NAMES = [
    name for name, cls in available_policies().items() if "token_budget" in cls.__dataclass_fields__
]


def method(name: str, budget: str = "256", **settings: Any) -> Method:
    return Method(label=name, name=name, settings=settings, budget=Budget.parse(budget))


def test_the_space_names_settings_that_policies_have() -> None:
    known = {field for cls in available_policies().values() for field in cls.__dataclass_fields__}
    assert set(SPACE) <= known


@pytest.mark.parametrize("name", NAMES)
def test_trials_have_the_budget_and_the_dense_layers_that_all_have(name: str) -> None:
    found = trials(method(name), 2048, GEOMETRY, 8, 2)
    made = [make_policy(name, settings).resolve(GEOMETRY) for settings in found]
    assert len({json.dumps(dataclasses.asdict(policy)) for policy in made}) == len(made)
    for policy in made:
        assert dataclasses.asdict(policy)["token_budget"] == 256
        if "full_layers" in available_policies()[name].__dataclass_fields__:
            assert len(policy.dense_layers(GEOMETRY)) == 2
    assert found == trials(method(name), 2048, GEOMETRY, 8, 2)
    # A window has nothing to set but its dense layers, RaaS only its threshold.
    assert len(found) == {"sliding_window": 4, "raas": 4}.get(name, 8)


@pytest.mark.parametrize("name", ["quest", "delta"])
def test_the_first_trial_is_the_default_with_the_first_layers_dense(name: str) -> None:
    first = trials(method(name), 2048, GEOMETRY, 8, 3)[0]
    assert make_policy(name, first).resolve(GEOMETRY).dense_layers(GEOMETRY) == (0, 1, 2)
    assert set(first) - {"full_layers", "delta_layers"} == {"token_budget"}


def test_what_the_user_set_is_not_tried() -> None:
    given = {"full_layers": (5,), "sink_size": 0}
    found = trials(method("quest", **given), 2048, GEOMETRY, 20, 2)
    assert {one["window_size"] for one in found if "window_size" in one} == {32, 64, 128}
    assert all(one["full_layers"] == (5,) and one["sink_size"] == 0 for one in found)
    assert len(found) == 4


def test_combinations_that_cannot_be_are_passed_over() -> None:
    """With a budget of two pages, sinks and half of the budget do not leave a page to choose."""
    found = trials(method("quest", "32"), 2048, GEOMETRY, 50, 2)
    assert found
    for settings in found:
        make_policy("quest", settings).resolve(GEOMETRY)
    every = list(combinations(["full_layers", "sink_size"], GEOMETRY, 2, 32))
    assert len(every) == len(dense_sets(GEOMETRY, 2)) * len(SPACE["sink_size"])


def test_dense_sets_have_one_size_and_the_first_layer() -> None:
    assert dense_sets(GEOMETRY, 2) == [(0, 1), (0, 3), (0, 6), (0, 9)]
    assert dense_sets(GEOMETRY, 3) == [(0, 1, 2), (0, 1, 3), (0, 1, 6), (0, 1, 9), (0, 4, 8)]
    assert dense_sets(shape(8, full=(2, 5, 7)), 2) == [(2, 5), (2, 7)]
    assert dense_sets(GEOMETRY, 0) == [()]
    assert dense_sets(shape(2), 4) == [(0, 1)]
    for size in range(1, 6):
        assert {len(one) for one in dense_sets(GEOMETRY, size)} == {size}


def test_shares_are_whole_pages() -> None:
    quarter = Fraction(1, 4)
    assert [Share(quarter).at(budget, 16) for budget in (16, 100, 256)] == [16, 16, 64]
    assert [Share(quarter, in_pages=True).at(budget, 16) for budget in (16, 256)] == [1, 4]


def line(score: float, read: float = 8.0) -> dict[str, Any]:
    return {"score": score, "bytes_per_step": read, "samples": 4}


def test_the_best_mean_wins_then_the_fewest_bytes() -> None:
    tried: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({"a": 1}, [line(0.5), line(0.6)]),
        ({"a": 2}, [line(1.0)]),  # refused at the other place
        ({"a": 3}, [line(0.7, 16), line(0.6)]),
        ({"a": 4}, [line(0.6), line(0.7)]),
    ]
    found = best_trial(tried, 2)
    assert found is not None
    assert found == Chosen(settings={"a": 4}, score=found.score, trials=4, samples=4)
    assert found.score == pytest.approx(0.65)
    assert "best of 4 trials on held-out samples (65.0 %)" in found.note
    assert best_trial(tried[1:2], 2) is None

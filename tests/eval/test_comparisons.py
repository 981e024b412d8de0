"""A method beside its controls: which lines are joined, on which samples, and what they tell."""

from __future__ import annotations

from typing import Any

import pytest

from keyhole.eval.comparisons import Comparison, compared
from tests.eval.eval_lines import full, line

S = {"token_budget": 128, "sink_size": 0, "full_layers": [0, 1]}
CONTROLS = {
    "recent": {"policy": "streaming_llm", "settings": S},
    "random": {"policy": "random", "settings": S | {"seed": 0}},
    "oracle": {"policy": "oracle", "settings": {"token_budget": 128, "full_layers": [0, 1]}},
}


def control(name: str, scores: list[float], **fields: Any) -> dict[str, Any]:
    return line(**CONTROLS[name], control=name, scores=scores, score=None, **fields)


def method(scores: list[float], **fields: Any) -> dict[str, Any]:
    return line(scores=scores, score=None, controls=CONTROLS, **fields)


def one(lines: list[dict[str, Any]]) -> Comparison:
    found = [one for one in compared(lines) if one is not None]
    assert len(found) == 1
    return found[0]


def test_a_method_is_compared_sample_by_sample() -> None:
    found = one(
        [
            full(),
            method([1, 1, 1, 0]),
            control("recent", [0, 1, 0, 0]),
            control("random", [0, 0, 0, 0]),
            control("oracle", [1, 1, 1, 1]),
        ]
    )
    assert (found.samples, found.score, found.full) == (4, 0.75, 1)
    assert found.controls == {"recent": 0.25, "random": 0, "oracle": 1}
    assert found.gain is not None
    assert (found.gain.points, found.gain.better, found.gain.worse) == (0.5, 2, 0)
    assert found.gain.p == 0.5
    assert found.gains["random"].better == 3
    assert found.distance == 0.25
    assert found.can_tell is True


def test_only_samples_that_all_have_count() -> None:
    found = one(
        [full(), method([1, 1, 1, 1, 0, 0]), control("recent", [0, 1]), control("oracle", [1] * 9)]
    )
    assert (found.samples, found.score) == (2, 1)
    assert found.controls == {"recent": 0.5, "oracle": 1}


def test_controls_are_of_the_same_samples_model_and_settings() -> None:
    others: list[dict[str, Any]] = [
        {"length": 2048},
        {"task": "tiny_walk"},
        {"task_settings": {"first_seed": 7}},
        {"setup": "question"},
        {"model": "another"},
        {"fingerprint": "another"},
        {"engine": {"kv_dtype": "int8"}},
    ]
    lines = [control("recent", [0] * 4, **other) for other in others]
    lines += [full(length=2048), control("recent", [0] * 4) | {"settings": S | {"sink_size": 4}}]
    found = one([method([1] * 4), *lines])
    assert (found.controls, found.gains, found.full) == ({}, {}, None)
    assert found.gain is found.distance is found.can_tell is None


def test_the_line_of_a_control_with_the_most_samples_counts_then_the_last() -> None:
    lines = [method([1] * 4), control("recent", [1] * 4), control("recent", [0] * 4)]
    assert one(lines).controls == {"recent": 0}
    assert one([*lines, control("recent", [1])]).samples == 4


def test_a_method_that_is_its_own_control_gains_nothing_over_it() -> None:
    recent = line(**CONTROLS["recent"], controls=CONTROLS, scores=[1, 0, 1, 1])
    found = one([full(), recent, control("oracle", [1] * 4)])
    assert found.gain is None
    assert found.distance == 0.25


@pytest.mark.parametrize(("wrong", "tells"), [(0, False), (5, False), (6, True), (100, True)])
def test_a_place_tells_nothing_where_recent_tokens_are_within_5_points_of_full(
    wrong: int, tells: bool
) -> None:
    recent = control("recent", [0] * wrong + [1] * (100 - wrong))
    assert one([full() | {"scores": [1] * 100}, method([1] * 100), recent]).can_tell is tells


def test_lines_without_controls_or_scores_have_no_comparison() -> None:
    odd = [method([1, None]), method([]), line(controls=None), line(controls="x"), line()]
    assert compared(odd) == [None] * 5
    assert one([line(controls={"recent": None}, scores=[1])]).controls == {}

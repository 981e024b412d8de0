"""The verdict of the demo on a method, from its answers and its control's."""

from __future__ import annotations

import pytest

from keyhole.engine.sequence import Stats
from keyhole.eval.demo import DemoOutcome, verdicts

STATS = Stats(
    prompt_tokens=8,
    cached_prompt_tokens=0,
    generated_tokens=2,
    ttft_ms=1.0,
    step_ms=1.0,
    attended_fraction=1.0,
    kv_bytes_read=8,
    other_bytes_read=0,
)


def outcome(task: str, policy: str, right: bool, *, is_control: bool = False) -> DemoOutcome:
    return DemoOutcome(
        task=task, policy=policy, is_control=is_control, correct=right, text="", stats=STATS
    )


def both(task: str, right: bool, control: bool) -> list[DemoOutcome]:
    """A task that full attention has right, under a method and its control."""
    return [
        outcome(task, "full", True),
        outcome(task, "delta", right),
        outcome(task, "delta", control, is_control=True),
    ]


@pytest.mark.parametrize(
    ("right", "control", "says"),
    [
        (True, True, "both right, so this task cannot tell whether delta's selection matters"),
        (True, False, "delta is right and its control wrong"),
        (False, True, "delta is wrong and its control right"),
        (False, False, "both wrong, so its selection does not help here"),
    ],
)
def test_a_method_is_judged_by_its_control(right: bool, control: bool, says: str) -> None:
    (line,) = verdicts(both("recall", right, control))
    assert line.startswith("recall: delta ")
    assert says in line


def test_tasks_with_the_same_two_answers_share_a_line() -> None:
    same = [*both("recall", True, True), *both("derive", True, True)]
    (line,) = verdicts(same)
    assert line.startswith("recall, derive: ")
    assert "these tasks cannot tell" in line
    assert len(verdicts([*both("recall", True, True), *both("derive", True, False)])) == 2


def test_nothing_is_said_where_full_attention_is_wrong() -> None:
    found = both("recall", True, False)
    assert verdicts([outcome("recall", "full", False), *found[1:]]) == []


def test_nothing_is_said_of_a_method_that_selects_nothing() -> None:
    assert verdicts([outcome("recall", "full", True), outcome("recall", "window", True)]) == []

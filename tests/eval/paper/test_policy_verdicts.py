"""Lines with controls become a verdict for each policy, and the settings to use."""

from __future__ import annotations

from typing import Any

from keyhole.eval.methods import FULL, Budget, Method
from keyhole.eval.paper.verdicts import (
    NO_BETTER,
    USE_IT,
    MethodVerdict,
    best_policy,
    policy_verdicts,
)
from tests.eval import eval_lines

Line = dict[str, Any]
SAMPLES = 200
RIGHT, HALF, WRONG = [1.0] * SAMPLES, [1.0, 0.0] * (SAMPLES // 2), [0.0] * SAMPLES


def line(method: str, length: int, budget: int | None, scores: list[float], **more: Any) -> Line:
    settings = {"token_budget": budget}
    known = {"fingerprint": "f", "task_settings": {}, "method": method, "policy": method}
    return eval_lines.line(
        **(known | {"length": length, "budget": budget, "settings": settings, "scores": scores}),
        samples=len(scores),
        **more,
    )


def cells(
    method: str, length: int, budget: int, own: list[float], recent: list[float], **more: Any
) -> list[Line]:
    """A method's line and its control's."""
    settings = {"token_budget": budget, "sink_size": 0, "full_layers": [0]}
    named = {"recent": {"policy": "streaming_llm", "settings": settings}}
    control = line("recent, dense 0", length, budget, recent) | named["recent"]
    about = {"controls": named, "dense_layers": [0]} | more
    return [line(method, length, budget, own, **about), control | {"control": "recent"}]


def reference(length: int, scores: list[float] = RIGHT) -> Line:
    return line("full", length, None, scores)


def share(name: str, text: str) -> Method:
    return Method(label=name, name=name, budget=Budget.parse(text))


def found(lines: list[Line], methods: list[Method], refused: list[Line]) -> list[MethodVerdict]:
    return policy_verdicts(lines, refused, [FULL, *methods], 16)


def test_a_share_is_one_budget_at_every_length_and_is_recommended_as_tokens() -> None:
    lines = [
        reference(1024),
        reference(2048),
        *cells("quest", 1024, 128, RIGHT, HALF, bytes_per_step=10.0),
        *cells("quest", 2048, 256, RIGHT, HALF, bytes_per_step=20.0),
        *cells("quest", 1024, 64, RIGHT, HALF),
        *cells("quest", 2048, 128, WRONG, WRONG),
    ]
    (one,) = found(lines, [share("quest", "1/8"), share("quest", "1/16")], [])
    assert one.found is not None
    assert [tried.text for tried, _ in one.found.budgets] == ["1/16", "1/8"]
    assert [judged.places for _, judged in one.found.budgets] == [2, 2]
    assert one.found.verdict == USE_IT
    tried = one.found.recommended
    assert tried is not None
    assert (tried.tokens, tried.line["length"], tried.bytes_per_step) == (256, 2048, 20.0)
    assert tried.line["settings"] == {"token_budget": 256}


def test_of_the_methods_to_use_the_one_that_reads_least_is_the_best() -> None:
    lines = [
        reference(1024),
        *cells("quest", 1024, 128, RIGHT, HALF, bytes_per_step=30.0),
        *cells("delta", 1024, 128, RIGHT, HALF, bytes_per_step=20.0),
        *cells("raas", 1024, 128, HALF, HALF, bytes_per_step=10.0),
    ]
    verdicts = found(lines, [share(name, "1/8") for name in ("quest", "delta", "raas")], [])
    assert [one.found and one.found.verdict for one in verdicts] == [
        USE_IT,
        USE_IT,
        NO_BETTER,
    ]
    chosen = best_policy(verdicts)
    assert chosen is not None
    assert chosen.label == "delta"
    assert best_policy(verdicts[2:]) is None


def test_samples_are_paired_as_far_as_every_line_has_them() -> None:
    """A line from a longer run before stands for a shorter one: its first samples are the same."""
    lines = [reference(1024, [*RIGHT, *WRONG]), *cells("quest", 1024, 128, RIGHT, HALF)]
    (one,) = found(lines, [share("quest", "1/8")], [])
    assert one.found is not None
    ((_, judged),) = one.found.budgets
    assert judged.loss.samples == SAMPLES
    assert judged.loss.points == 0


def test_a_place_without_its_control_does_not_count_and_a_refusal_has_a_reason() -> None:
    alone = cells("quest", 1024, 128, RIGHT, HALF)[:1]
    errors = [{"method": "quest", "error": "too small"}, {"method": "delta", "error": "no layers"}]
    lines = [reference(1024), *alone]
    verdicts = found(lines, [share("quest", "1/8"), share("delta", "1/8")], errors * 2)
    assert [one.found for one in verdicts] == [None, None]
    assert [one.refused for one in verdicts] == [("too small",), ("no layers",)]

"""Budgets and the list of methods."""

from __future__ import annotations

import pytest

from keyhole.errors import ConfigError
from keyhole.eval.methods import Budget, Method, under_budgets
from keyhole.policies.controls import Full
from keyhole.policies.delta import Delta

DELTA = Method(label="delta", name="delta", settings={"recent_pages": 2})


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1", 1), ("250", 250), ("1/8", 240), ("0.125", 240), ("1/1", 2000), ("1/4000", 16)],
)
def test_a_budget_is_tokens_or_a_share_in_whole_pages(text: str, tokens: int) -> None:
    assert Budget.parse(text).at(2000, page_size=16) == tokens


@pytest.mark.parametrize("text", ["0", "-1", "9/8", "0/8", "1/0", "0.0", "1.5", "many", "", "-1/8"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"budget {text!r} must be a number of tokens"):
        Budget.parse(text)


def test_full_attention_is_first_and_once() -> None:
    budgets = [Budget.parse("32"), Budget.parse("1/4")]
    own = Method(label="own", name="quest", settings={"token_budget": 48})
    found = under_budgets([Method(label="full", name="full"), DELTA, own], budgets)
    assert [(m.name, m.budget and m.budget.text) for m in found] == [
        ("full", None),
        ("delta", "32"),
        ("delta", "1/4"),
        ("quest", None),
    ]
    assert [m.policy(256, 16) for m in found][:2] == [
        Full(),
        Delta(recent_pages=2, token_budget=32),
    ]
    assert found[2].policy(256, 16) == Delta(recent_pages=2, token_budget=64)

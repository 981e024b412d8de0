"""Adaptive budgets: the fewest entries that hold a share of the scores, up to the budget.

Ours. Attention is sometimes concentrated and sometimes spread out; a fixed budget is too large for
the one and too small for the other. With `recall` a selection keeps its best entries until their
scores sum to that share of all scores, between `min_budget` and `token_budget` tokens. Shapes stay
those of `token_budget`: dropped entries become padding, which is not read.
"""

from __future__ import annotations

from keyhole.config import is_count, is_number, require


def settled(
    recall: float | None, min_budget: int | None, token_budget: int, least: int, unit: int = 1
) -> int | None:
    """`min_budget` in tokens, by default a quarter of `token_budget`; None without `recall`.

    least: tokens that every selection has; unit: tokens of an entry. ConfigError names a bad value.
    """
    if recall is None:
        require(min_budget is None, "min_budget", min_budget, "None without recall")
        return None
    right = "a share above 0 and below 1, of the scores' mass"
    require(is_number(recall) and 0 < recall < 1, "recall", recall, right)
    if min_budget is None:
        return max(least, token_budget // 4 // unit * unit)
    right = f"from {least}, which every choice has, to token_budget {token_budget}"
    require(
        is_count(min_budget, least) and min_budget <= token_budget, "min_budget", min_budget, right
    )
    return min_budget // unit * unit

"""Budgets: tokens that every step reads, and the fewest entries that hold a share of the scores."""

from __future__ import annotations

from keyhole.config import is_count, is_number, require


def always_read(
    sink_size: object, window_size: object, token_budget: int, unit: int = 1
) -> tuple[int, int]:
    """How many first and newest entries of `unit` tokens hold `sink_size` and `window_size` tokens.

    Both are rounded up to whole entries; the newest one counts as full. A window of None is the
    newest entry, which every policy reads. ConfigError if a size is wrong, or if both together
    exceed token_budget.
    """
    require(is_count(sink_size, 0), "sink_size", sink_size, "at least 0")
    right = "at least 1, or None for the newest alone"
    require(window_size is None or is_count(window_size), "window_size", window_size, right)
    assert isinstance(sink_size, int)
    assert window_size is None or isinstance(window_size, int)
    first, last = whole_entries(sink_size, unit), max(1, whole_entries(window_size, unit))
    whole = "" if unit == 1 else f" in whole pages of {unit}"
    least = (first + last) * unit
    right = f"at least {least}: sink_size {sink_size} and window_size {window_size or 1}{whole}"
    require(token_budget >= least, "token_budget", token_budget, right)
    return first, last


def whole_entries(size: int | None, unit: int = 1) -> int:
    """Entries of `unit` tokens that hold `size` tokens; None is none."""
    return -(-(size or 0) // unit)


# Adaptive budgets: the fewest entries that hold a share of the scores, up to the budget.
#
# Ours. Attention is sometimes concentrated and sometimes spread out; a fixed budget is too large
# for the one and too small for the other. With `recall` a selection keeps its best entries until
# their scores sum to that share of all scores, between `min_budget` and `token_budget` tokens.
# Shapes stay those of `token_budget`: dropped entries become padding, which is not read.


def resolve_min_budget(
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

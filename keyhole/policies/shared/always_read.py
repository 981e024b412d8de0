"""First and newest tokens that every step reads, whatever a policy selects beside them."""

from __future__ import annotations

from keyhole.config import is_count, require


def settled(
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
    first, last = entries(sink_size, unit), max(1, entries(window_size, unit))
    whole = "" if unit == 1 else f" in whole pages of {unit}"
    least = (first + last) * unit
    right = f"at least {least}: sink_size {sink_size} and window_size {window_size or 1}{whole}"
    require(token_budget >= least, "token_budget", token_budget, right)
    return first, last


def entries(size: int | None, unit: int = 1) -> int:
    """Entries of `unit` tokens that hold `size` tokens; None is none."""
    return -(-(size or 0) // unit)

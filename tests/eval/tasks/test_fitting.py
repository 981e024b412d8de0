"""The largest text that fits, with few tries, however unevenly texts grow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keyhole.errors import ConfigError
from keyhole.eval.tasks.base import Written, fitted


def words(text: str) -> int:
    return len(text.split())


def writer(tokens: Callable[[int], int], sizes: list[int]) -> Callable[[int], Written]:
    """Texts of `tokens(size)` words and one of the question; the sizes asked for are noted."""

    def write(size: int) -> Written:
        sizes.append(size)
        return Written(context="a " * tokens(size), question="b", answers=("c",), max_new_tokens=9)

    return write


@pytest.mark.one_in(5)
@pytest.mark.parametrize("limit", [11, 12, 127, 1000, 4097, 100_000])
@pytest.mark.parametrize(
    "tokens",
    [
        lambda size: size,
        lambda size: 12 * size // 5,
        lambda size: size + 50 * (size // 100),
        lambda size: int(size**1.5),
        lambda size: int(10 * size**0.6),
    ],
)
def test_it_is_filled_within_a_hundredth_by_few_tries(
    tokens: Callable[[int], int], limit: int
) -> None:
    sizes: list[int] = []
    sample = fitted("task", limit, 0, words, writer(tokens, sizes), least=0)
    size = next(size for size in range(limit**2) if tokens(size + 1) + 10 > limit)
    used = sample.prompt_tokens + sample.max_new_tokens
    assert min(tokens(size) + 10, 0.99 * limit) <= used <= limit
    assert len(sizes) <= 20


def test_there_may_be_no_more_to_write() -> None:
    sizes: list[int] = []
    write = writer(lambda size: 3 * size, sizes)
    assert fitted("task", 10_000, 0, words, write, most=7).prompt_tokens == 22
    assert max(sizes) == 7
    assert fitted("task", 10_000, 0, words, write, least=7, most=7).prompt_tokens == 22
    # A text that does not grow ends the search as well.
    assert fitted("task", 10_000, 0, words, writer(lambda size: 50, []), least=1)


def test_a_length_that_is_too_short_is_an_error_with_the_least() -> None:
    with pytest.raises(ConfigError, match="length 39 is too short for task: it needs at least 40"):
        fitted("task", 39, 0, words, writer(lambda size: 10 * size, []), least=3)

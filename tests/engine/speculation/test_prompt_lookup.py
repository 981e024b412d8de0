"""Prompt look-up against a search that tries every place."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole import SamplingParams
from keyhole.engine.sequence import Sequence
from keyhole.engine.speculation.prompt_lookup import continuation, propose
from keyhole.tokenization import Detokenizer


def searched(text: list[int], most: int) -> list[int]:
    """The definition: longest match first, then the latest; copied token by token."""
    for length in (3, 2, 1):
        last = text[-length:]
        for start in range(len(text) - length - 1, -1, -1):
            if len(last) == length and text[start : start + length] == last:
                longer = list(text)
                for place in range(start + length, start + length + most):
                    longer.append(longer[place])
                return longer[len(text) :]
    return []


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 8))
def test_it_finds_what_a_search_of_every_place_finds(text: list[int], most: int) -> None:
    assert continuation(np.asarray(text, np.int64), most) == searched(text, most)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ([], []),
        ([5], []),
        ([5, 6, 7], []),
        ([5, 5], [5, 5, 5, 5]),
        ([1, 2, 9, 1, 2], [9, 1, 2, 9]),
        ([7, 8, 7, 9, 7], [9, 7, 9, 7]),  # the latest
        ([1, 2, 3, 4, 0, 2, 3, 5, 1, 2, 3], [4, 0, 2, 3]),  # the longest before the latest
    ],
)
def test_examples(text: list[int], wanted: list[int]) -> None:
    assert continuation(np.asarray(text, np.int64), 4) == wanted


def test_texts_grow_and_do_not_mix() -> None:
    texts = [[1, 2, 3, 1], [4, 4, 5]]
    made = [
        Sequence(array("i", text), SamplingParams(max_tokens=9), Detokenizer(None))
        for text in texts
    ]
    for token in (2, 5, 4, 3, 1, 2, 4, 4, 5):
        for sequence in made:
            assert propose(sequence, 3) == searched(sequence.tokens.tolist(), 3)
            sequence.tokens.append(token)

"""Of a choice as many entries as a share of the scores asks for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from tests.effort import examples
from tests.kernels.test_top_k import check_form
from tests.oracle import best, enough

#: Sums of these are exact in float32, and many are equal.
SCORES = st.sampled_from((0.0, 0.25, 0.5, 1.0, 4.0))
SHARES = st.sampled_from((0.01, 0.25, 0.5, 0.75, 0.999))


@pytest.mark.slow
@given(st.data(), st.integers(1, 15), SHARES, st.integers(0, 9), st.sampled_from((1, 16)))
@examples(300)
def test_entries_are_taken_until_the_share_is_there(
    data: st.DataObject, k: int, share: float, least: int, unit: int
) -> None:
    width = data.draw(st.integers(1, 12))
    valid = data.draw(st.lists(st.integers(1, width), min_size=1, max_size=3))
    row = st.lists(SCORES, min_size=width, max_size=width)
    scores = [data.draw(st.lists(row, min_size=2, max_size=2)) for _ in valid]
    first = data.draw(st.integers(0, k))
    last = data.draw(st.integers(0, k - first))
    places = {"first": first, "last": last}
    given_scores = torch.tensor(scores)
    for b, n in enumerate(valid):
        given_scores[b, :, n:] = math.nan  # nobody looks beyond the end
    lengths = torch.tensor(valid, dtype=torch.int32)
    chosen = kernels.top_k(given_scores, lengths, k, unit, first=first, last=last)
    found = kernels.top_p(chosen, given_scores, lengths, share, least=least, **places)
    wanted = [
        [enough(head[:n], best(head[:n], k, **places), share, least, **places) for head in heads]
        for heads, n in zip(scores, valid, strict=True)
    ]
    assert check_form(found, k, unit) == wanted

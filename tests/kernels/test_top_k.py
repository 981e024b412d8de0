"""Top-k with ties, places that are always taken, and rows with too few entries."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.kernels import Selection
from tests.effort import examples
from tests.oracle import best

#: Few distinct numbers, so that most comparisons are ties; entries past the end may be anything.
SCORES = st.sampled_from((0.0, -0.0, 0.25, 0.5, 1.0, -3.0, -math.inf))
REST = st.sampled_from((math.nan, math.inf, 1e30, 0.0))


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[list[list[float]]], list[int], int]:
    """Scores [B][H][n], how many of the n exist, and the width n."""
    width = draw(st.integers(1, 12))
    heads = draw(st.integers(1, 3))
    valid = draw(st.lists(st.integers(1, width), min_size=1, max_size=3))
    scores = [
        [
            draw(st.lists(SCORES, min_size=n, max_size=n))
            + draw(st.lists(REST, min_size=width - n, max_size=width - n))
            for _ in range(heads)
        ]
        for n in valid
    ]
    return scores, valid, width


def check_form(selection: Selection, k: int, unit: int) -> list[list[list[int]]]:
    """The chosen entries, after the form that every Selection must have."""
    assert selection.indices.dtype == torch.int32
    assert selection.counts.dtype == torch.int32
    assert selection.unit == unit
    assert selection.indices.shape == (*selection.counts.shape, k)
    chosen = []
    for row, counts in zip(selection.indices.tolist(), selection.counts.tolist(), strict=True):
        heads = []
        for indices, count in zip(row, counts, strict=True):
            assert indices[count:] == [-1] * (k - count)
            assert indices[:count] == sorted(set(indices[:count]))
            heads.append(indices[:count])
        chosen.append(heads)
    return chosen


@pytest.mark.slow
@given(rows(), st.integers(1, 15), st.sampled_from((1, 16)), st.data())
@example(([[[1.0] * 6]], [6], 6), 3, 16, None)
@examples(300)
def test_the_best_entries_ties_to_the_earlier(
    example: tuple[list[list[list[float]]], list[int], int],
    k: int,
    unit: int,
    data: st.DataObject | None,
) -> None:
    scores, valid, _ = example
    first = data.draw(st.integers(0, k)) if data else 0
    last = data.draw(st.integers(0, k - first)) if data else 1
    found = kernels.top_k(
        torch.tensor(scores),
        torch.tensor(valid, dtype=torch.int32),
        k,
        unit,
        first=first,
        last=last,
    )
    wanted = [
        [best(head[:n], k, first=first, last=last) for head in row]
        for row, n in zip(scores, valid, strict=True)
    ]
    assert check_form(found, k, unit) == wanted


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 20), st.integers(0, 19))
@examples(200)
def test_the_first_and_the_newest_tokens(lengths: list[int], k: int, first: int) -> None:
    first = min(first, k - 1)
    found = kernels.recent_indices(torch.tensor(lengths, dtype=torch.int32), k, first=first)
    wanted = [
        [[i for i in range(n) if i < first or i >= n - (k - first)] if n > k else list(range(n))]
        for n in lengths
    ]
    assert check_form(found, k, 1) == wanted

"""Bounds of the keys of a page, and what they say of a query's scores."""

from __future__ import annotations

import torch
from hypothesis import given

from keyhole import kernels
from tests.effort import examples
from tests.kernels.paged import Paged, assert_close, paged
from tests.oracle import bound, bounds, float64

many = examples(100)


def _bounds(case: Paged) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of all pages of all sequences, by the kernel; NaN elsewhere."""
    shape = (len(case.keys), case.num_kv_heads, case.keys.shape[3])
    low, high = (torch.full(shape, torch.nan, dtype=case.keys.dtype) for _ in range(2))
    for row, length in enumerate(case.lengths.tolist()):
        count = -(-length // case.page_size)
        starts = torch.arange(count) * case.page_size
        filled = (length - starts).clamp(max=case.page_size)
        kernels.page_bounds(case.keys, low, high, case.table[row, :count].long(), filled)
    return low, high


@given(paged())
@many
def test_bounds_cover_exactly_the_tokens_that_are_there(case: Paged) -> None:
    low, high = _bounds(case)
    touched = torch.zeros(len(low), dtype=torch.bool)
    for row, length in enumerate(case.lengths.tolist()):
        pages = case.table[row, : -(-length // case.page_size)].long()
        touched[pages] = True
        lowest, highest = bounds(case.tokens(row)[0], case.page_size)
        assert (float64(low[pages].transpose(0, 1)) == lowest).all()
        assert (float64(high[pages].transpose(0, 1)) == highest).all()
    assert low[~touched].isnan().all()
    assert high[~touched].isnan().all()


@given(paged())
@many
def test_bound_scores_are_the_formula(case: Paged) -> None:
    low, high = _bounds(case)
    found = kernels.bound_scores(case.query, low, high, case.table)
    assert found.dtype == torch.float32
    assert found.shape == (len(case.query), case.num_kv_heads, case.table.shape[1])
    for row, length in enumerate(case.lengths.tolist()):
        lowest, highest = bounds(case.tokens(row)[0], case.page_size)
        wanted = torch.tensor(bound(float64(case.query[row]), lowest, highest)).double().numpy()
        count = -(-length // case.page_size)
        assert_close(found[row, :, :count], wanted, torch.float32, loss=1e-4)


@given(paged())
@many
def test_no_token_scores_above_the_bound_of_its_page(case: Paged) -> None:
    low, high = _bounds(case)
    found = float64(kernels.bound_scores(case.query, low, high, case.table))
    group = case.query.shape[1] // case.num_kv_heads
    for row, length in enumerate(case.lengths.tolist()):
        keys, query = case.tokens(row)[0], float64(case.query[row])
        for head in range(len(query)):
            for i in range(length):
                score = query[head] @ keys[head // group, i]
                assert score <= found[row, head // group, i // case.page_size] + 1e-4


def test_a_broken_key_stays_in_the_bounds_and_in_their_scores() -> None:
    keys = torch.randn(4, 2, 16, 40, generator=torch.Generator().manual_seed(0))
    keys[0, 1, 0, 3] = keys[1, 0, 15, 39] = keys[2, 1, 7, 20] = torch.nan
    low, high = (torch.empty(4, 2, 40) for _ in range(2))
    pages = torch.arange(4)
    kernels.page_bounds(keys, low, high, pages, torch.full((4,), 16))
    broken = keys.isnan().any(2)
    assert torch.equal(low.isnan(), broken)
    assert torch.equal(high.isnan(), broken)
    for heads in (2, 6, 14):
        scores = kernels.bound_scores(torch.ones(1, heads, 40), low, high, pages.int()[None])
        assert torch.equal(scores[0].T.isnan(), broken.any(-1))

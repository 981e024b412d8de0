"""Representatives and scores of blocks of pages, against loops in float64."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.kernels import Selection
from tests.kernels.paged import Paged, assert_close, paged
from tests.oracle import float64


@given(paged(windows=False))
def test_a_page_is_represented_by_the_key_farthest_from_their_mean(case: Paged) -> None:
    """Pages hold NaN where no token is."""
    size = case.page_size
    found = torch.full((*case.keys.shape[:2], case.keys.shape[3]), torch.nan).to(case.keys.dtype)
    for row, length in enumerate(case.lengths.tolist()):
        pages = case.table[row, : -(-length // size)].long()
        filled = torch.tensor([min(size, length - i * size) for i in range(len(pages))])
        kernels.representative_keys(case.keys, found, pages, filled)
        for page, count in zip(pages.tolist(), filled.tolist(), strict=True):
            for head, keys in enumerate(float64(case.keys[page, :, :count])):
                far = ((keys - keys.mean(0)) ** 2).sum(1)
                place = int((keys == float64(found[page, head])).all(1).argmax())
                assert np.array_equal(keys[place], float64(found[page, head]))
                assert far[place] >= far.max() - 1e-4 * (1 + far.max())


def test_of_equal_keys_the_earlier_one_stands_for_the_page() -> None:
    one, other = torch.tensor([3.0, 0.0]), torch.tensor([-1.0, 0.0])
    keys = torch.stack([other, one, other, one, other, other, other, one])[None, None]
    keys = torch.cat([keys, keys.flip(2)])
    found = torch.zeros(2, 1, 2)
    kernels.representative_keys(keys, found, torch.tensor([0, 1]), torch.tensor([3, 8]))
    assert torch.equal(found[:, 0], torch.stack([one, one]))


@given(paged(windows=False), st.integers(1, 3), st.booleans(), st.data())
def test_a_block_scores_the_mean_of_its_pages_that_are_there(
    case: Paged, size: int, thinned: bool, data: st.DataObject
) -> None:
    """Representatives of pages that a sequence does not have are NaN."""
    heads, dim = case.keys.shape[1], case.keys.shape[3]
    counts = (case.lengths + case.page_size - 1) // case.page_size
    used = [case.table[row, :count] for row, count in enumerate(counts.tolist())]
    stored = torch.full((len(case.keys), heads, dim), torch.nan)
    for pages in used:
        stored[pages.long()] = torch.randn(len(pages), heads, dim)
    stored = stored.to(case.keys.dtype)
    width = case.table.shape[1]
    there = torch.ones(len(counts), width, dtype=torch.bool)
    if thinned:
        one = st.lists(st.booleans(), min_size=width, max_size=width)
        there = torch.tensor([data.draw(one) for _ in counts])
    found = kernels.block_scores(
        case.query, stored, case.table, counts, size, there if thinned else None
    )
    assert found.shape == (len(counts), 1, -(-width // size))
    assert found.dtype == torch.float32
    group = case.query.shape[1] // heads
    for row, pages in enumerate(used):
        query, keys = float64(case.query[row]), float64(stored[pages.long()])
        by_page = [
            sum(float(query[h] @ keys[place, h // group]) for h in range(len(query)))
            for place in range(len(pages))
        ]
        for block in range(found.shape[2]):
            places = range(block * size, min((block + 1) * size, len(pages)))
            scores = [by_page[place] for place in places if there[row, place]]
            value = found[row, 0, block].item()
            if scores:
                wanted = np.array([sum(scores) / len(scores)])
                scale = torch.tensor([value])
                assert_close(scale, wanted, torch.float32)
            else:
                assert value == -np.inf


def test_blocks_are_spelled_out_as_pages() -> None:
    indices = torch.tensor([[[0, 2, 3]], [[0, 1, -1]], [[0, -1, -1]]], dtype=torch.int32)
    blocks = Selection(indices, (indices >= 0).sum(2, dtype=torch.int32), 8)
    found = kernels.block_pages(blocks, torch.tensor([7, 4, 1], dtype=torch.int32), 4)
    assert found.unit == 4
    assert found.indices.tolist() == [
        [[0, 1, 4, 5, 6, -1]],
        [[0, 1, 2, 3, -1, -1]],
        [[0, -1, -1, -1, -1, -1]],
    ]
    assert found.counts.tolist() == [[5], [4], [1]]
    assert found.indices.dtype == found.counts.dtype == torch.int32

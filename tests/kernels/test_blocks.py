"""What tokens receive, what represents a block, and scores of blocks, against loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keyhole import kernels
from keyhole.kernels import Selection
from tests.kernels.paged import Paged, assert_close, paged
from tests.oracle import Array, float64, most_received, window_weights


def nothing(case: Paged, *shape: int) -> Tensor:
    """Side data of pages with NaN in it, [P, ...]."""
    return torch.full((len(case.keys), *shape), torch.nan).to(case.keys.dtype)


def received(stored: Tensor, pages: Tensor, length: int) -> Array:
    """The sums of one sequence's tokens, [Hq, length]."""
    sums = float64(stored[pages]).sum(1)  # [M, Hq, page_size]
    return sums.transpose(1, 0, 2).reshape(stored.shape[2], -1)[:, :length]


@given(paged(windows=False), st.integers(1, 9), st.integers(0, 5), st.data())
def test_tokens_receive_the_weights_of_their_windows_queries(
    case: Paged, window: int, init: int, data: st.DataObject
) -> None:
    """Prompts in any parts, then a step of all sequences; NaN where no token is."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    heads, dim = case.query.shape[1:]
    stored = nothing(case, 2, heads, case.page_size)
    options = {"scale": case.scale, "softcap": case.softcap, "sinks": case.sinks}
    queries = []
    for row, length in enumerate(case.lengths.tolist()):
        query = torch.randn(length, heads, dim, generator=generator).to(case.query.dtype)
        query[-1] = case.query[row]
        queries.append(query)
        start = 0
        while start < length - 1:
            end = data.draw(st.integers(start + 1, length - 1))
            kernels.add_received(
                query[None, start:end],
                case.keys,
                stored,
                case.table[row, : -(-end // case.page_size)].long()[None],
                torch.tensor([start]),
                torch.tensor([0]),
                window=window,
                init=init,
                **options,
            )
            start = end
    kernels.add_received(
        case.query[:, None],
        case.keys,
        stored,
        case.table.long(),
        case.lengths.long() - 1,
        torch.zeros(len(case.lengths), dtype=torch.int64),
        window=window,
        init=init,
        **options,
    )
    wanted_options = options | {"sinks": case.sinks64()}
    for row, (query, length) in enumerate(zip(queries, case.lengths.tolist(), strict=True)):
        keys, _ = case.tokens(row)
        rows = float64(query).transpose(1, 0, 2)
        wanted = window_weights(rows, keys, window, init, wanted_options).sum(1)
        found = received(stored, case.table[row].long(), length)
        # Two 16-bit numbers hold a 32-bit number except for its last few bits.
        near = 1e-4 if stored.dtype == torch.float32 else 2e-3
        assert np.abs(found - wanted).max() <= near * max(1.0, wanted.max())


def test_what_known_tokens_received_is_left_alone() -> None:
    """Tokens from the sixth on are computed; whatever those before received stays."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 1, 4, 8, generator=generator)
    query = torch.randn(1, 10, 2, 8, generator=generator)
    table = torch.tensor([[2, 0, 1]])
    whole = torch.full((3, 2, 2, 4), torch.nan)
    where = {"window": 4, "init": 1, "scale": 0.3}
    kernels.add_received(query, keys, whole, table, torch.tensor([0]), torch.tensor([0]), **where)
    part = whole.clone()
    part[[0, 1], :, :, 2:] = torch.nan
    part[0, :, :, :2] = 7.0
    kernels.add_received(
        query[:, 6:], keys, part, table, torch.tensor([6]), torch.tensor([6]), **where
    )
    assert (part[0, 0, :, :2] == 7.0).all()
    assert torch.equal(part[2], whole[2])
    assert torch.allclose(part[0, :, :, 2:], whole[0, :, :, 2:])
    assert torch.allclose(part[1, :, :, :2], whole[1, :, :, :2])


@pytest.mark.slow
@given(paged(windows=False), st.integers(1, 3), st.integers(1, 5), st.data())
def test_a_block_is_represented_by_what_received_most(
    case: Paged, per_block: int, count: int, data: st.DataObject
) -> None:
    """Ties go to the earlier token; blocks that are not there change nothing."""
    heads, dim, size = case.query.shape[1], case.keys.shape[3], case.page_size
    count = min(count, per_block * size)
    stored, found = nothing(case, 2, heads, size), nothing(case, heads, dim)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    blocks, real = [], []
    for row, length in enumerate(case.lengths.tolist()):
        pages = case.table[row, : length // size].long()
        stored[pages] = torch.randint(0, 3, (len(pages), 2, heads, size), generator=generator).to(
            stored.dtype
        )
        for start in range(0, len(pages) - per_block + 1, per_block):
            blocks.append(pages[start : start + per_block])
            real.append(data.draw(st.booleans()))
    if not blocks:
        return
    table = torch.stack(blocks)
    kernels.represent_blocks(case.keys, stored, found, table, torch.tensor(real), count)
    for pages, there in zip(blocks, real, strict=True):
        if not there:
            assert found[pages[0]].isnan().all()
            continue
        keys = np.concatenate([float64(case.keys[page]) for page in pages], axis=1)
        sums = received(stored, pages, per_block * size)
        assert_close(found[pages[0]], most_received(keys, sums, count), found.dtype)


@pytest.mark.slow
@given(paged(windows=False), st.integers(1, 3))
def test_a_block_scores_the_sum_over_query_heads(case: Paged, per_block: int) -> None:
    """Representatives of pages that begin no block are NaN."""
    heads, dim = case.query.shape[1], case.keys.shape[3]
    counts = (case.lengths + case.page_size - 1) // case.page_size
    table = case.table[:, ::per_block].contiguous()
    stored = nothing(case, heads, dim)
    number = (counts + per_block - 1) // per_block
    generator = torch.Generator().manual_seed(per_block)
    for row, count in enumerate(number.tolist()):
        drawn = torch.randn(count, heads, dim, generator=generator)
        stored[table[row, :count].long()] = drawn.to(stored.dtype)
    found = kernels.block_scores(case.query, stored, table, number.int())
    assert found.shape == (len(counts), 1, table.shape[1])
    assert found.dtype == torch.float32
    for row, count in enumerate(number.tolist()):
        query = float64(case.query[row])
        for block in range(count):
            keys = float64(stored[table[row, block].long()])
            wanted = np.array([sum(float(query[h] @ keys[h]) for h in range(heads))])
            # A sum of float32 loses that much of its terms, however small it comes out.
            loss = 2**-23 * float(np.abs(query * keys).sum())
            assert_close(found[row, :, block], wanted, torch.float32, loss=loss)


def test_ends_and_blocks_between_them_are_spelled_out_as_pages() -> None:
    """One first page, two last ones, blocks of two; the last block may reach into the last pages.

    Sequences of few pages, whose ends meet.
    """
    indices = torch.tensor([[[0, 2, 3]], [[0, 1, -1]], [[-1, -1, -1]], [[-1, -1, -1]]])
    indices = indices.to(torch.int32)
    blocks = Selection(indices, (indices >= 0).sum(2, dtype=torch.int32), 8)
    pages = torch.tensor([10, 6, 2, 1], dtype=torch.int32)
    found = kernels.between_ends(blocks, pages, 4, (1, 2))
    assert found.unit == 4
    assert found.indices.tolist() == [
        [[0, 1, 2, 5, 6, 7, 8, 9, -1]],
        [[0, 1, 2, 3, 4, 5, -1, -1, -1]],
        [[0, 1, -1, -1, -1, -1, -1, -1, -1]],
        [[0, -1, -1, -1, -1, -1, -1, -1, -1]],
    ]
    assert found.counts.tolist() == [[8], [6], [2], [1]]
    assert found.indices.dtype == found.counts.dtype == torch.int32


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

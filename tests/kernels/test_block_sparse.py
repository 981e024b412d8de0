"""Attention over blocks of keys, and the scores of blocks, against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.kernels import Selection
from keyhole.kernels.reference import attention as reference_attention
from tests.effort import examples
from tests.kernels.paged import Paged, assert_close, paged
from tests.oracle import Array, attention, float64

#: Weights are rounded to the dtype where torch multiplies them.
_LOSS = {torch.float32: 0.0, torch.bfloat16: 4 * 2.0**-9, torch.float16: 4 * 2.0**-11}


def _lists(
    start: int, end: int, size: int, heads: int, seed: int
) -> tuple[Selection, list[list[list[int]]]]:
    """Random blocks for each row of blocks and each head, its own among them."""
    random = np.random.default_rng(seed)
    first, rows = start // size, -(-end // size) - start // size
    lists = [
        [sorted({*random.integers(0, own + 1, 2).tolist(), own}) for _ in range(heads)]
        for own in range(first, first + rows)
    ]
    most = max(len(one) for row in lists for one in row) + 1
    padded = [[one + [-1] * (most - len(one)) for one in row] for row in lists]
    counts = [[len(one) for one in row] for row in lists]
    return Selection(_int32(padded), _int32(counts), size), lists


def _int32(numbers: list) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _check(case: Paged, start: int, size: int) -> None:
    end = int(case.lengths[0])
    heads, random = case.query.shape[1], torch.Generator().manual_seed(end)
    query = torch.randn(end - start, *case.query.shape[1:], generator=random)
    query = query.to(case.query.dtype)
    blocks, lists = _lists(start, end, size, heads, end)
    found = kernels.block_sparse_prefill(
        query,
        case.keys,
        case.values,
        case.table[0].long(),
        start,
        blocks=blocks,
        scale=case.scale,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    assert found.dtype == query.dtype
    keys, values = case.tokens(0)
    wanted = []
    for i, row in enumerate(query):
        own = start + i
        of_row = lists[own // size - start // size]
        read = [
            [t for b in one for t in range(b * size, (b + 1) * size) if t <= own] for one in of_row
        ]
        options = {"scale": case.scale, "softcap": case.softcap, "sinks": case.sinks64()}
        wanted.append(attention(float64(row), keys, values, read, **options)[0])
    assert_close(found, np.stack(wanted), query.dtype, loss=_LOSS[query.dtype])


@pytest.mark.slow
@given(paged(windows=False, max_batch=1), st.sampled_from((2, 5, 16, 48)), st.data())
@examples(150)
def test_each_head_reads_the_blocks_listed_for_it(
    case: Paged, size: int, data: st.DataObject
) -> None:
    _check(case, data.draw(st.integers(0, int(case.lengths[0]) - 1)), size)


@given(case=paged(windows=False, max_batch=1), most=st.integers(1, 2000))
@examples(50)
def test_parts_of_rows_give_the_same(case: Paged, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_attention, "MAX_SCORES", most)
        _check(case, 0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_more_tokens_than_a_task_has(dtype: torch.dtype) -> None:
    """Several tasks of the C++ kernel share a block's lists; a chunk begins inside a block."""
    random = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(21, 2, 16, 24, generator=random).to(dtype) for _ in range(2))
    query = torch.randn(300, 6, 24, generator=random).to(dtype)
    pages = torch.randperm(21, generator=random)
    blocks, _ = _lists(33, 333, 150, 6, 0)
    given = (query, keys, values, pages, 33)
    found = kernels.block_sparse_prefill(*given, blocks=blocks, scale=0.3)
    wanted = kernels.reference.block_sparse_prefill(
        *(x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given),
        blocks=blocks,
        scale=0.3,
    )
    assert_close(found, float64(wanted), dtype, loss=_LOSS[dtype])


def antidiagonal_scores(
    query: Array, keys: Array, start: int, size: int, stride: int, scale: float, cap: float | None
) -> Array:
    """Section 2.1 with numpy: query [T, Hq, D], keys [Hkv, N, D]; the result [R, Hq, C]."""
    end, group = start + len(query), query.shape[1] // len(keys)
    first, rows = start // size, -(-end // size) - start // size
    out = np.zeros((rows, query.shape[1], -(-end // size)))
    for head in range(query.shape[1]):
        for square in range(start // stride, -(-end // stride)):
            products: list[float] = []
            for other in range(square + 1):
                pairs = []
                for i in range(stride):
                    q, k = square * stride + stride - 1 - i, other * stride + i
                    if start <= q < end:
                        key = keys[head // group, k] if k < end else np.zeros(query.shape[2])
                        pairs.append(float(query[q - start, head] @ key))
                score = scale * math.fsum(pairs) / len(pairs)
                products.append(score if cap is None else cap * math.tanh(score / cap))
            weights = np.exp(np.array(products) - max(products))
            weights /= weights.sum()
            for other, weight in enumerate(weights):
                block = other * stride // size
                out[square * stride // size - first, head, block] += weight
    return out


@given(paged(windows=False, max_batch=1), st.sampled_from(((4, 2), (16, 4), (24, 8))), st.data())
@examples(80)
def test_antidiagonal_scores_are_those_of_the_paper(
    case: Paged, sizes: tuple[int, int], data: st.DataObject
) -> None:
    end, (size, stride) = int(case.lengths[0]), sizes
    start = data.draw(st.integers(0, end - 1))
    random = torch.Generator().manual_seed(end)
    query = torch.randn(end - start, *case.query.shape[1:], generator=random)
    query = query.to(case.query.dtype)
    found = kernels.antidiagonal_scores(
        query,
        case.keys,
        case.table[0].long(),
        start,
        block_size=size,
        stride=stride,
        scale=case.scale,
        softcap=case.softcap,
    )
    keys, _ = case.tokens(0)
    wanted = antidiagonal_scores(
        float64(query), keys, start, size, stride, case.scale, case.softcap
    )
    # Products are rounded to the dtype before the softmax, so that its weights differ by as much.
    within = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.03}[query.dtype]
    assert found.shape == wanted.shape
    assert np.abs(float64(found) - wanted).max() <= within

"""Bounds of a page's keys, and Quest's score of a page from them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keyhole.kernels.triton.kv_splits import in_float32


@triton.jit
def _page_bounds(
    key_pages,
    low,
    high,
    pages,
    filled,
    stride_kp,
    stride_kh,
    stride_kt,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    number, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    page, count = tl.load(pages + number), tl.load(filled + number)
    d = tl.arange(0, D_PADDED)
    least = tl.full([D_PADDED], float("inf"), tl.float32)
    most = tl.full([D_PADDED], float("-inf"), tl.float32)
    broken = tl.zeros([D_PADDED], tl.int32)
    for start in range(0, count.to(tl.int32), TOKENS):
        t = start + tl.arange(0, TOKENS)
        mask = (t < count)[:, None] & (d < D)[None]
        rows = key_pages + page * stride_kp + head * stride_kh + t * stride_kt
        key = tl.load(rows[:, None] + d[None], mask=mask, other=0.0).to(tl.float32)
        least = tl.minimum(least, tl.min(tl.where(mask, key, float("inf")), 0))
        most = tl.maximum(most, tl.max(tl.where(mask, key, float("-inf")), 0))
        broken = tl.maximum(broken, tl.max((key != key).to(tl.int32), 0))
    # The hardware's minimum and maximum ignore NaN, which must propagate.
    least = tl.where(broken > 0, float("nan"), least)
    most = tl.where(broken > 0, float("nan"), most)
    into = (page * HEADS + head) * D + d
    tl.store(low + into, least.to(low.dtype.element_ty), mask=d < D)
    tl.store(high + into, most.to(high.dtype.element_ty), mask=d < D)


def page_bounds(
    key_pages: Tensor, low: Tensor, high: Tensor, pages: Tensor, filled: Tensor
) -> None:
    """As the reference."""
    assert low.is_contiguous()  # the cache allocates them contiguous
    assert high.is_contiguous()
    if not len(pages):
        return
    _, num_kv_heads, _, dim = key_pages.shape
    _page_bounds[len(pages), num_kv_heads](
        key_pages,
        low,
        high,
        pages.long().contiguous(),
        filled.long().contiguous(),
        *key_pages.stride()[:3],
        HEADS=num_kv_heads,
        D=dim,
        D_PADDED=triton.next_power_of_2(dim),
        TOKENS=16,
    )


@triton.jit
def _bound_scores(
    query,
    low,
    high,
    page_table,
    out,
    stride_table,
    num_pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    FLOAT32: tl.constexpr,
    ROWS: tl.constexpr,
    PAGES: tl.constexpr,
    DIMS: tl.constexpr,
):
    number = tl.program_id(0)
    sequence, head = (number // HEADS).to(tl.int64), number % HEADS
    m = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    is_page = m < num_pages
    page = tl.load(page_table + sequence * stride_table + m, mask=is_page, other=0).to(tl.int64)
    bounds = (page * HEADS + head) * D
    g = tl.arange(0, ROWS)
    query += (sequence * HEADS + head) * GROUP * D
    score = tl.zeros([ROWS, PAGES], tl.float32)
    for start in tl.static_range(0, D, DIMS):
        d = start + tl.arange(0, DIMS)
        q = tl.load(query + g[:, None] * D + d[None], (g < GROUP)[:, None] & (d < D)[None], 0.0)
        mask = is_page[:, None] & (d < D)[None]
        most = tl.load(high + bounds[:, None] + d[None], mask=mask, other=0.0)
        least = tl.load(low + bounds[:, None] + d[None], mask=mask, other=0.0)
        if FLOAT32:
            q, most, least = q.to(tl.float32), most.to(tl.float32), least.to(tl.float32)
        # A positive q_d is bounded by high_d, a negative one by low_d.
        positive, negative = tl.where(q > 0, q, 0.0), tl.where(q < 0, q, 0.0)
        score += tl.dot(positive.to(q.dtype), tl.trans(most), input_precision="ieee")
        score += tl.dot(negative.to(q.dtype), tl.trans(least), input_precision="ieee")
    score = tl.where((g < GROUP)[:, None], score, float("-inf"))
    broken = tl.max((score != score).to(tl.int32), 0)
    best = tl.where(broken > 0, float("nan"), tl.max(score, 0))
    tl.store(out + number.to(tl.int64) * num_pages + m, best, mask=is_page)


def bound_scores(query: Tensor, low: Tensor, high: Tensor, page_table: Tensor) -> Tensor:
    """As the reference."""
    query, low, high = query.contiguous(), low.contiguous(), high.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    (num_rows, num_heads, dim), num_kv_heads = query.shape, low.shape[1]
    num_pages, group, pages = page_table.shape[1], num_heads // num_kv_heads, 32
    shape = (num_rows, num_kv_heads, num_pages)
    out = torch.empty(shape, dtype=torch.float32, device=query.device)
    _bound_scores[num_rows * num_kv_heads, -(-num_pages // pages)](
        query,
        low,
        high,
        page_table,
        out,
        page_table.stride(0),
        num_pages,
        HEADS=num_kv_heads,
        GROUP=group,
        D=dim,
        FLOAT32=in_float32(query),
        ROWS=max(16, triton.next_power_of_2(group)),
        PAGES=pages,
        DIMS=min(64, max(16, triton.next_power_of_2(dim))),
    )
    return out

"""A prompt's tokens at any positions over chosen tokens that are not after them, in their pages.

A program computes a tile of the queries of one query head, over the chosen tokens up to the last
position of the tile (FlashAttention-2's loop, Dao, arXiv 2307.08691, over a list of tokens).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from keyhole.kernels.reference.quantised import row_dim
from keyhole.kernels.triton.attend import in_float32, two_parts
from keyhole.kernels.triton.block_prefill import LARGEST_HEAD, LOG2E, attend_tile, finished
from keyhole.kernels.triton.quantised import code

#: Queries and keys of a tile; fewer for large heads, whose tiles would not fit in shared memory.
_TILE, _SMALL_TILE = 64, 16


@triton.jit
def _attend_chosen(
    query,
    key_pages,
    value_pages,
    pages,
    positions,
    tokens,
    firsts,
    ends,
    sinks,
    out,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_vp,
    stride_vh,
    stride_vt,
    num_queries,
    window,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    FLOAT32: tl.constexpr,
    CODE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One tile of queries of a head; `firsts`, `ends`: what each tile reads of `tokens`."""
    tile, head = tl.program_id(0), tl.program_id(1)
    t = tile * ROWS + tl.arange(0, ROWS)
    is_row = t < num_queries
    own = tl.load(positions + t, mask=is_row, other=-1)

    d1, dv = tl.arange(0, D1), tl.arange(0, DV_PADDED)
    from_row = query + (t.to(tl.int64) * HEADS + head)[:, None] * D
    q1 = tl.load(from_row + d1[None], mask=is_row[:, None] & (d1 < D)[None], other=0.0)
    if FLOAT32:
        q1 = q1.to(tl.float32)
    d2, q2 = d1, q1
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(from_row + d2[None], mask=is_row[:, None] & (d2 < D)[None], other=0.0)
        if FLOAT32:
            q2 = q2.to(tl.float32)

    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, DV_PADDED], tl.float32),
    )
    end = tl.load(ends + tile)
    for begin in range(tl.load(firsts + tile), end, TOKENS):
        i = begin + tl.arange(0, TOKENS)
        known = i < end
        position = tl.load(tokens + i, mask=known, other=0)
        page = tl.load(pages + position // SIZE, mask=known, other=0).to(tl.int64)
        place = position % SIZE
        seen = known[None] & (position[None] <= own[:, None])
        if WINDOW:
            seen = seen & (position[None] > own[:, None] - window)
        state = attend_tile(
            q1,
            q2,
            state,
            key_pages + page * stride_kp + (head // GROUP) * stride_kh + place * stride_kt,
            value_pages + page * stride_vp + (head // GROUP) * stride_vh + place * stride_vt,
            seen,
            known,
            d1,
            d2,
            dv,
            scale,
            softcap,
            D,
            D2,
            DV,
            SOFTCAP,
            FLOAT32,
            CODE,
        )

    result = finished(state, sinks, head, SINKS)
    into = out + (t.to(tl.int64) * HEADS + head)[:, None] * DV + dv[None]
    tl.store(into, result.to(out.dtype.element_ty), mask=is_row[:, None] & (dv < DV)[None])


def sparse_prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    positions: Tensor,
    tokens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference."""
    query, pages, tokens = query.contiguous(), pages.contiguous(), tokens.long().contiguous()
    num_queries, num_heads, dim = query.shape
    first, rest = two_parts(dim)
    value_dim = row_dim(value_pages)
    rows = _TILE if max(dim, value_dim) <= LARGEST_HEAD else _SMALL_TILE
    tiles = F.pad(positions.long(), (0, -num_queries % rows), mode="constant", value=-1)
    tiles = tiles.view(-1, rows)
    ends = torch.searchsorted(tokens, tiles.amax(1), right=True).int()
    firsts = ends.new_zeros(len(ends))
    if window is not None:
        lowest = tiles.where(tiles >= 0, tiles.amax(1, keepdim=True)).amin(1)
        firsts = torch.searchsorted(tokens, lowest - window, right=True).int()
    out = query.new_empty(num_queries, num_heads, value_dim)
    _attend_chosen[len(tiles), num_heads](
        query,
        key_pages,
        value_pages,
        pages,
        tiles,
        tokens,
        firsts,
        ends,
        out if sinks is None else sinks.contiguous(),
        out,
        *key_pages.stride()[:3],
        *value_pages.stride()[:3],
        num_queries,
        window or 0,
        scale * LOG2E if softcap is None else scale / softcap,
        0.0 if softcap is None else softcap * LOG2E,
        HEADS=num_heads,
        GROUP=num_heads // key_pages.shape[1],
        SIZE=key_pages.shape[2],
        D=dim,
        D1=first,
        D2=rest,
        DV=value_dim,
        DV_PADDED=max(16, triton.next_power_of_2(value_dim)),
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        FLOAT32=in_float32(query),
        CODE=code(key_pages),
        ROWS=rows,
        TOKENS=rows,
        num_warps=4,
        num_stages=2,
    )
    return out

"""A prompt's tokens over selected tokens before them, page by page in place: blocks, or a list.

A program computes a tile of queries of one query head. In `block_sparse_prefill` they are of one
block, and read the blocks that this head selected for it; in `sparse_prefill` they are at any
positions, and read the chosen tokens up to the last position of the tile (FlashAttention-2's loop,
Dao, arXiv 2307.08691, over a list of blocks or tokens).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from keyhole.kernels import reference
from keyhole.kernels.reference.quantised import row_dim
from keyhole.kernels.selection import Selection
from keyhole.kernels.triton.attend import in_float32, load_queries, tile_scores, two_parts
from keyhole.kernels.triton.quantised import code, scales_of, widened

_LOG2E = 1.4426950408889634
#: Queries and keys of a tile; fewer for large heads, whose tiles would not fit in shared memory.
_TILE, _SMALL_TILE = 64, 16
#: Queries of a tile over pages of 8 bits: with 64, `_attend_chosen` was wrong on an H200
#: (benchmarks/LOG.md).
_TILE_OF_8_BITS = 32
_LARGEST_HEAD = 128


@triton.jit
def _attend_tile(
    state,
    queries,
    numbers,
    keys,
    values,
    seen,
    known,
    scale,
    softcap,
    D: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FLOAT32: tl.constexpr,
    CODE: tl.constexpr,
):
    """One tile of keys: `keys` and `values` point to rows, `seen` [queries, keys] is what counts.

    state: maximum, sum and weighted values of the tiles before; returns them with this one.
    queries, numbers: from `load_queries`.
    """
    m_i, l_i, acc = state
    s, k1 = tile_scores(
        queries, numbers, keys, known, scale, softcap, D, D2, SOFTCAP, FLOAT32, CODE
    )
    s = tl.where(seen, s, float("-inf"))

    m_new = tl.maximum(m_i, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(m_i - base)
    l_i = l_i * alpha + tl.sum(p, 1)
    dv = tl.arange(0, DV_PADDED)
    v = tl.load(values[:, None] + dv[None], mask=known[:, None] & (dv < DV)[None], other=0)
    if CODE > 0:
        v = widened(v, CODE).to(k1.dtype)
        p = p * scales_of(values, known, DV, CODE)[None]
    if FLOAT32:
        v = v.to(tl.float32)
    acc = acc * alpha[:, None]
    acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def _store(
    state,
    sinks,
    out,
    row,
    is_row,
    head,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Writes the attention of each query after its last tile; `state` as in `_attend_tile`."""
    m_i, l_i, acc = state
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        m_new = tl.maximum(m_i, sink)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.exp2(sink - m_new)
        acc = acc * alpha[:, None]
    result = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    dv = tl.arange(0, DV_PADDED)
    into = out + row[:, None] * DV + dv[None]
    tl.store(into, result.to(out.dtype.element_ty), mask=is_row[:, None] & (dv < DV)[None])


@triton.jit
def _attend_blocks(
    query,
    key_pages,
    value_pages,
    pages,
    indices,
    counts,
    sinks,
    out,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_vp,
    stride_vh,
    stride_vt,
    start,
    num_tokens,
    num_listed,
    lead,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    FLOAT32: tl.constexpr,
    CODE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One tile of queries of a head; `lead`: tokens of the first block before the first query."""
    cuts: tl.constexpr = (UNIT + ROWS - 1) // ROWS
    part, head = tl.program_id(0), tl.program_id(1)
    block = part // cuts
    row = (part % cuts) * ROWS + tl.arange(0, ROWS)  # in the block
    t = block * UNIT + row - lead
    is_row = (row < UNIT) & (t >= 0) & (t < num_tokens)
    own = start + t
    last = tl.max(tl.where(is_row, own, -1), 0)

    query_row = t.to(tl.int64) * HEADS + head
    queries, numbers = load_queries(query, query_row, is_row, D, D1, D2, FLOAT32)

    list_number = (block * HEADS + head).to(tl.int64)
    indices += list_number * num_listed
    count = tl.load(counts + list_number) * UNIT
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, DV_PADDED], tl.float32),
    )
    for begin in range(0, count, TOKENS):
        i = begin + tl.arange(0, TOKENS)
        position = tl.load(indices + i // UNIT, mask=i < count, other=-1) * UNIT + i % UNIT
        known = (i < count) & (position <= last)
        position = tl.where(known, position, 0)
        page = tl.load(pages + position // SIZE, mask=known, other=0).to(tl.int64)
        place = position % SIZE

        keys = key_pages + page * stride_kp + (head // GROUP) * stride_kh + place * stride_kt
        values = value_pages + page * stride_vp + (head // GROUP) * stride_vh + place * stride_vt
        seen = known[None] & (position[None] <= own[:, None])
        state = _attend_tile(
            state,
            queries,
            numbers,
            keys,
            values,
            seen,
            known,
            scale,
            softcap,
            D,
            D2,
            DV,
            DV_PADDED,
            SOFTCAP,
            FLOAT32,
            CODE,
        )

    _store(state, sinks, out, query_row, is_row, head, DV, DV_PADDED, SINKS)


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

    query_row = t.to(tl.int64) * HEADS + head
    queries, numbers = load_queries(query, query_row, is_row, D, D1, D2, FLOAT32)
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
        keys = key_pages + page * stride_kp + (head // GROUP) * stride_kh + place * stride_kt
        values = value_pages + page * stride_vp + (head // GROUP) * stride_vh + place * stride_vt
        state = _attend_tile(
            state,
            queries,
            numbers,
            keys,
            values,
            seen,
            known,
            scale,
            softcap,
            D,
            D2,
            DV,
            DV_PADDED,
            SOFTCAP,
            FLOAT32,
            CODE,
        )

    _store(state, sinks, out, query_row, is_row, head, DV, DV_PADDED, SINKS)


def _options(
    query: Tensor, key_pages: Tensor, out: Tensor, softcap: float | None, sinks: Tensor | None
) -> dict[str, Any]:
    """The constants of a launch that follow from the shapes and dtypes of its operands."""
    dim, value_dim = query.shape[2], out.shape[2]
    first, rest = two_parts(dim)
    return {
        "HEADS": query.shape[1],
        "GROUP": query.shape[1] // key_pages.shape[1],
        "SIZE": key_pages.shape[2],
        "D": dim,
        "D1": first,
        "D2": rest,
        "DV": value_dim,
        "DV_PADDED": max(16, triton.next_power_of_2(value_dim)),
        "SOFTCAP": softcap is not None,
        "SINKS": sinks is not None,
        "FLOAT32": in_float32(query),
        "CODE": code(key_pages),
        "num_warps": 4,
        "num_stages": 2,
    }


def _scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """The kernels' `scale` and `softcap`: for powers of two, and of a softcap's tanh."""
    if softcap is None:
        return scale * _LOG2E, 0.0
    return scale / softcap, softcap * _LOG2E


def _tile(query: Tensor, out: Tensor) -> int:
    return _TILE if max(query.shape[2], out.shape[2]) <= _LARGEST_HEAD else _SMALL_TILE


def block_sparse_prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    start: int,
    *,
    blocks: Selection,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference."""
    query, pages = query.contiguous(), pages.contiguous()
    indices, counts = blocks.indices.int().contiguous(), blocks.counts.int().contiguous()
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty(num_tokens, num_heads, row_dim(value_pages))
    tile = _tile(query, out)
    most = min(tile, _TILE_OF_8_BITS) if code(key_pages) else tile
    rows = min(most, max(16, triton.next_power_of_2(blocks.unit)))
    _attend_blocks[len(indices) * -(-blocks.unit // rows), num_heads](
        query,
        key_pages,
        value_pages,
        pages,
        indices,
        counts,
        out if sinks is None else sinks.contiguous(),
        out,
        *key_pages.stride()[:3],
        *value_pages.stride()[:3],
        start,
        num_tokens,
        indices.shape[2],
        start % blocks.unit,
        *_scales(scale, softcap),
        UNIT=blocks.unit,
        ROWS=rows,
        TOKENS=tile,
        **_options(query, key_pages, out, softcap, sinks),
    )
    return out


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
    """As the reference, which computes pages of 8 bits: there this kernel was wrong on a GPU."""
    if code(key_pages):
        return reference.sparse_prefill(
            query,
            key_pages,
            value_pages,
            pages,
            positions,
            tokens,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    query, pages, tokens = query.contiguous(), pages.contiguous(), tokens.long().contiguous()
    num_queries, num_heads, _ = query.shape
    out = query.new_empty(num_queries, num_heads, row_dim(value_pages))
    rows = _tile(query, out)
    tiles = F.pad(positions.long(), (0, -num_queries % rows), mode="constant", value=-1)
    tiles = tiles.view(-1, rows)
    ends = torch.searchsorted(tokens, tiles.amax(1), right=True).int()
    firsts = ends.new_zeros(len(ends))
    if window is not None:
        lowest = tiles.where(tiles >= 0, tiles.amax(1, keepdim=True)).amin(1)
        firsts = torch.searchsorted(tokens, lowest - window, right=True).int()
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
        *_scales(scale, softcap),
        WINDOW=window is not None,
        ROWS=rows,
        TOKENS=rows,
        **_options(query, key_pages, out, softcap, sinks),
    )
    return out

"""Attention of one query token per sequence over all tokens, some pages or some tokens.

A program computes some query heads of a group over a split of the tokens.

Split-K attention (Flash-Decoding): each split of a sequence's tokens returns the largest score, the
sum of exponentials and the weighted values; a second kernel combines the splits. Their number
depends on shapes only; the tokens per split depend on the sequence's length, read on the device, so
that every split has work in long and in short sequences.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from keyhole.kernels.reference.quantised import row_dim
from keyhole.kernels.selection import PagedQuery, Selection
from keyhole.kernels.triton import flash_attention, overlap
from keyhole.kernels.triton.quantised import code, scales_of, widened
from keyhole.kernels.triton.splits import Split, split


def two_parts(dim: int) -> tuple[int, int]:
    """A head size as the sum of two powers of two: the first fits in it, the second is padded.

    MLA's 576 would have to be padded to 1024; 512 + 64 is exact, and so are 80 and 96.
    """
    first = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - first
    return first, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


def in_float32(tensor: Tensor) -> bool:
    """Whether products are computed in float32.

    Under the interpreter bfloat16 is too: it stores bfloat16 as integers and would multiply those.
    """
    interpreted = tensor.device.type != "cuda" and tensor.dtype == torch.bfloat16
    return tensor.dtype == torch.float32 or interpreted


_LOG2E = math.log2(math.e)


@triton.jit
def load_queries(
    query,
    row,
    is_row,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """Rows of `query`, int64, in two parts (`two_parts`), and the numbers of a head in these."""
    d1 = tl.arange(0, D1)
    q1 = tl.load(
        query + row[:, None] * D + d1[None], mask=is_row[:, None] & (d1 < D)[None], other=0.0
    )
    if FLOAT32:
        q1 = q1.to(tl.float32)
    d2, q2 = d1, q1
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(
            query + row[:, None] * D + d2[None], mask=is_row[:, None] & (d2 < D)[None], other=0.0
        )
        if FLOAT32:
            q2 = q2.to(tl.float32)
    return (q1, q2), (d1, d2)


@triton.jit
def tile_scores(
    queries,
    numbers,
    keys,
    known,
    scale,
    softcap,
    D: tl.constexpr,
    D2: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FLOAT32: tl.constexpr,
    CODE: tl.constexpr,
):
    """The logits times log2(e) of some queries, and the first part of the keys.

    queries, numbers: from `load_queries`. keys: pointers to rows, of which those that are `known`
    are read.
    """
    q1, q2 = queries
    d1, d2 = numbers
    k1 = tl.load(keys[:, None] + d1[None], mask=known[:, None] & (d1 < D)[None], other=0)
    if CODE > 0:
        k1 = widened(k1, CODE).to(q1.dtype)
    if FLOAT32:
        k1 = k1.to(tl.float32)
    s = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    if D2 > 0:
        k2 = tl.load(keys[:, None] + d2[None], mask=known[:, None] & (d2 < D)[None], other=0)
        if CODE > 0:
            k2 = widened(k2, CODE).to(q2.dtype)
        if FLOAT32:
            k2 = k2.to(tl.float32)
        s += tl.dot(q2, tl.trans(k2), input_precision="ieee")
    s = s * scale
    if CODE > 0:
        s = s * scales_of(keys, known, D, CODE)[None]
    if SOFTCAP:  # scale holds 1 / softcap, softcap holds log2(e)
        e = tl.exp2(tl.abs(s) * -2.8853900817779268)  # e^(-2 |s|)
        s = tl.where(s < 0, -softcap, softcap) * ((1.0 - e) / (1.0 + e))
    return s, k1


@triton.jit
def _part(
    query,
    key_pages,
    value_pages,
    page_table,
    lengths,
    indices,
    counts,
    out,
    largest,
    total,
    scores,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_vp,
    stride_vh,
    stride_vt,
    stride_table,
    num_listed,
    num_tokens,
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
    LISTS: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    VALUES: tl.constexpr,
    SHARED: tl.constexpr,
    SCORES: tl.constexpr,
    FLOAT32: tl.constexpr,
    CODE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One split of the tokens that some query heads of one group of a sequence read.

    LISTS: lists of `indices` per sequence, 0 for all tokens. `scores` receives the logits times
    log2(e), float32 [B, Hq, num_tokens].
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    number, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    block, head = number % BLOCKS, (number // BLOCKS) % HEADS
    sequence = (number // BLOCKS) // HEADS
    length = tl.load(lengths + sequence)
    seen_from = 0
    if WINDOW:
        seen_from = tl.maximum(length - window, 0)

    # begin .. end of the tokens that are read, in the order in which they are listed.
    if LISTS > 0:
        row = sequence * LISTS + (head if LISTS > 1 else 0)
        indices += row.to(tl.int64) * num_listed
        first, count = 0, tl.load(counts + row) * UNIT
    else:
        first, count = seen_from, length - seen_from
    share = tl.cdiv(tl.cdiv(count, parts), TOKENS) * TOKENS
    begin = first + part * share
    end = tl.minimum(begin + share, first + count)

    g = block * ROWS + tl.arange(0, ROWS)
    is_row = g < GROUP
    query_row = (sequence * HEADS + head).to(tl.int64) * GROUP + g
    dv = tl.arange(0, DV_PADDED)
    queries, numbers = load_queries(query, query_row, is_row, D, D1, D2, FLOAT32)

    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PADDED], tl.float32)
    for start in range(begin, end, TOKENS):
        i = start + tl.arange(0, TOKENS)
        known = i < end
        if LISTS > 0:
            position = tl.load(indices + i // UNIT, mask=known, other=-1) * UNIT + i % UNIT
        else:
            position = i
        known = known & (position >= seen_from) & (position < length)
        position = tl.where(known, position, 0)
        table = page_table + sequence.to(tl.int64) * stride_table
        page = tl.load(table + position // SIZE, mask=known, other=0).to(tl.int64)
        place = position % SIZE

        keys = key_pages + page * stride_kp + head * stride_kh + place * stride_kt
        s, k1 = tile_scores(
            queries, numbers, keys, known, scale, softcap, D, D2, SOFTCAP, FLOAT32, CODE
        )
        if SCORES:
            into = scores + query_row[:, None] * num_tokens + position[None]
            tl.store(into, s, mask=is_row[:, None] & known[None])
        s = tl.where(known[None], s, float("-inf"))

        m_new = tl.maximum(m_i, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m_i - base)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        if VALUES:
            if SHARED:  # MLA: the values are the first numbers of the keys, already loaded
                v = k1
            else:
                values = value_pages + page * stride_vp + head * stride_vh + place * stride_vt
                v_mask = known[:, None] & (dv < DV)[None]
                v = tl.load(values[:, None] + dv[None], mask=v_mask, other=0)
                if CODE > 0:
                    v = widened(v, CODE).to(k1.dtype)
                    p = p * scales_of(values, known, DV, CODE)[None]
                if FLOAT32:
                    v = v.to(tl.float32)
            acc = acc * alpha[:, None]
            acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")

    into = query_row * parts + part
    tl.store(largest + into, m_i, mask=is_row)
    tl.store(total + into, l_i, mask=is_row)
    if VALUES:
        mask = is_row[:, None] & (dv < DV)[None]
        tl.store(out + into[:, None] * DV + dv[None], acc, mask=mask)


@triton.jit
def _join(
    mixed,
    largest,
    total,
    sinks,
    out,
    splits,
    DV: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    DIMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Combines the splits of one query head; a sequence without tokens returns zeros."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, SPLITS_PADDED), block * DIMS + tl.arange(0, DIMS)
    at = row * splits + s
    high = tl.load(largest + at, mask=s < splits, other=float("-inf"))
    weight = tl.load(total + at, mask=s < splits, other=0.0)
    highest = tl.max(high, 0)
    if SINKS:
        sink = tl.load(sinks + row % QUERY_HEADS).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp2(high - base)
    whole = tl.sum(weight * share, 0)
    if SINKS:
        whole += tl.exp2(sink - base)
    mask = (s < splits)[:, None] & (d < DV)[None]
    parts = tl.load(mixed + at[:, None] * DV + d[None], mask=mask, other=0.0)
    result = tl.sum(parts * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + row * DV + d, result.to(out.dtype.element_ty), mask=d < DV)


def parts_of(
    paged: PagedQuery,
    cut: Split,
    *,
    scale: float,
    selection: Selection | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scores: Tensor | None = None,
    values: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of each split: values [B, Hq, splits, Dv], largest score and sum [B, Hq, splits].

    Scores are in units of log2(e); with `scores`, float32 [B, Hq, N], all of them are stored there.
    Without `values` the first of the three is undefined.
    """
    query, key_pages, value_pages, page_table, lengths = paged
    query, lengths = query.contiguous(), lengths.int()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    (num_rows, num_heads, dim), num_kv_heads = query.shape, key_pages.shape[1]
    first, rest = two_parts(dim)
    value_dim = row_dim(value_pages)
    shared = (
        value_pages.data_ptr() == key_pages.data_ptr()
        and value_pages.stride() == key_pages.stride()
        and value_dim == first
    )
    largest, total = (
        torch.empty(num_rows, num_heads, cut.splits, dtype=torch.float32, device=query.device)
        for _ in range(2)
    )
    mixed = largest.new_empty(*largest.shape, value_dim) if values else largest
    indices, counts, lists, unit = lengths, lengths, 0, 1  # pointers that are not used
    if selection is not None:
        indices, counts = selection.indices.int().contiguous(), selection.counts.int().contiguous()
        lists, unit = indices.shape[1], selection.unit
    _part[num_rows * num_kv_heads * cut.blocks, cut.splits](
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        indices,
        counts,
        mixed,
        largest,
        total,
        largest if scores is None else scores,
        *key_pages.stride()[:3],
        *value_pages.stride()[:3],
        page_table.stride(0),
        indices.shape[2] if lists else 0,
        scores.shape[2] if scores is not None else 0,
        window or 0,
        scale * _LOG2E if softcap is None else scale / softcap,
        0.0 if softcap is None else softcap * _LOG2E,
        HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        SIZE=key_pages.shape[2],
        D=dim,
        D1=first,
        D2=rest,
        DV=value_dim,
        DV_PADDED=max(16, triton.next_power_of_2(value_dim)),
        LISTS=lists,
        UNIT=unit,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        VALUES=values,
        SHARED=shared,
        SCORES=scores is not None,
        FLOAT32=in_float32(query),
        CODE=code(key_pages),
        ROWS=cut.rows,
        BLOCKS=cut.blocks,
        TOKENS=cut.tokens,
        num_warps=8 if value_dim > 128 else 4,
        num_stages=cut.stages,
        **overlap.options(),
    )
    return mixed, largest, total


def joined(
    mixed: Tensor, largest: Tensor, total: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The combined splits, [B, Hq, Dv]."""
    num_rows, num_heads, splits, value_dim = mixed.shape
    out = mixed.new_empty(num_rows, num_heads, value_dim, dtype=dtype)
    dims = min(128, triton.next_power_of_2(value_dim))
    _join[num_rows * num_heads, -(-value_dim // dims)](
        mixed,
        largest,
        total,
        largest if sinks is None else sinks.contiguous(),
        out,
        splits,
        DV=value_dim,
        QUERY_HEADS=num_heads,
        SINKS=sinks is not None,
        SPLITS_PADDED=triton.next_power_of_2(splits),
        DIMS=dims,
        **overlap.options(),
    )
    return out


def attend(
    paged: PagedQuery,
    *,
    scale: float,
    selection: Selection | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference."""
    query, key_pages, _, page_table, _ = paged
    if selection is None and flash_attention.takes(paged, softcap, sinks):
        return flash_attention.attend(paged, scale, window)
    tokens = page_table.shape[1] * key_pages.shape[2]
    if selection is not None:
        tokens = selection.indices.shape[2] * selection.unit
    elif window is not None:
        tokens = min(tokens, window)
    cut = split(query, key_pages.shape[1], tokens, listed=selection is not None)
    parts = parts_of(paged, cut, scale=scale, selection=selection, window=window, softcap=softcap)
    return joined(*parts, sinks, query.dtype)

"""Attention over all tokens with its reduced weights, or the weights alone (retrieval heads).

The first kernel stores the logits, float32 [B, Hq, N]: for a group of few heads that is less
traffic than reading the keys again. The second one turns them into weights, once the sums of all
splits are known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keyhole.kernels.selection import PagedQuery, ScoreRequest
from keyhole.kernels.triton.attend import joined, parts_of
from keyhole.kernels.triton.splits import split

#: Tokens of a block, and heads at a time: a program loops over all heads of a list.
_TOKENS, _HEADS = 512, 8


@triton.jit
def _weights(
    scores,
    largest,
    total,
    sinks,
    lengths,
    out,
    num_tokens,
    splits,
    QUERY_HEADS: tl.constexpr,
    LISTS: tl.constexpr,
    SUM: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Weights of a block of tokens: the largest, or the sum, of the query heads of one list.

    Summed over every UNIT tokens.
    """
    number = tl.program_id(0)
    sequence, member = (number // LISTS).to(tl.int64), number % LISTS
    heads: tl.constexpr = QUERY_HEADS // LISTS
    i = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    known = i < tl.load(lengths + sequence)
    s = tl.arange(0, SPLITS_PADDED)
    reduced = tl.zeros([TOKENS], tl.float32)
    for offset in range(0, heads, AT_ONCE):
        place = offset + tl.arange(0, AT_ONCE)
        head, is_head = member * heads + place, place < heads
        row = sequence * QUERY_HEADS + head
        at, there = row[:, None] * splits + s[None], is_head[:, None] & (s < splits)[None]
        high = tl.load(largest + at, mask=there, other=float("-inf"))
        weight = tl.load(total + at, mask=there, other=0.0)
        highest = tl.max(high, 1)
        if SINKS:
            sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
            sink *= 1.4426950408889634
            highest = tl.maximum(highest, sink)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        whole = tl.sum(weight * tl.exp2(high - base[:, None]), 1)
        if SINKS:
            whole += tl.exp2(sink - base)
        whole = tl.where(whole == 0.0, 1.0, whole)
        at, there = row[:, None] * num_tokens + i[None], is_head[:, None] & known[None]
        score = tl.load(scores + at, mask=there, other=float("-inf"))
        share = tl.exp2(score - base[:, None]) / whole[:, None]
        if SUM:
            reduced += tl.sum(share, 0)
        else:  # NaN propagates
            broken = (reduced != reduced) | (tl.max((share != share).to(tl.int32), 0) > 0)
            reduced = tl.where(broken, float("nan"), tl.maximum(reduced, tl.max(share, 0)))
    if UNIT > 1:
        reduced = tl.sum(tl.reshape(reduced, (TOKENS // UNIT, UNIT)), 1)
        i = tl.program_id(1) * (TOKENS // UNIT) + tl.arange(0, TOKENS // UNIT)
    into = out + number.to(tl.int64) * (num_tokens // UNIT) + i
    tl.store(into, reduced, mask=i < num_tokens // UNIT)


def _reduced(
    reduce: str,
    unit: int,
    scores: Tensor,
    largest: Tensor,
    total: Tensor,
    sinks: Tensor | None,
    lengths: Tensor,
    num_kv_heads: int,
) -> Tensor:
    """Reduced weights of each `unit` tokens, float32 [B, Hkv or Hq or 1, N / unit]."""
    num_rows, num_heads, num_tokens = scores.shape
    lists = {"group_max": num_kv_heads, "none": num_heads}.get(reduce, 1)
    splits, tokens = largest.shape[2], _TOKENS
    out = scores.new_empty(num_rows, lists, num_tokens // unit)
    _weights[num_rows * lists, -(-num_tokens // tokens)](
        scores,
        largest,
        total,
        largest if sinks is None else sinks.contiguous(),
        lengths.int(),
        out,
        num_tokens,
        splits,
        QUERY_HEADS=num_heads,
        LISTS=lists,
        SUM=reduce == "sum",
        SINKS=sinks is not None,
        SPLITS_PADDED=triton.next_power_of_2(splits),
        AT_ONCE=min(_HEADS, triton.next_power_of_2(num_heads // lists)),
        TOKENS=tokens,
        UNIT=unit,
    )
    return out


def _scored(
    paged: PagedQuery, scale: float, softcap: float | None, *, values: bool = True
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """All scores, float32 [B, Hq, N] (undefined past a sequence's end), and the splits."""
    query, key_pages, _, page_table, _ = paged
    num_tokens = page_table.shape[1] * key_pages.shape[2]
    cut = split(query, key_pages.shape[1], num_tokens)
    shape = (*query.shape[:2], num_tokens)
    scores = torch.empty(shape, dtype=torch.float32, device=query.device)
    return scores, parts_of(paged, cut, scale=scale, softcap=softcap, scores=scores, values=values)


def attend_and_score(
    paged: PagedQuery,
    *,
    requests: tuple[ScoreRequest, ...],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As the reference."""
    query, key_pages, _, _, lengths = paged
    scores, parts = _scored(paged, scale, softcap)
    sums = (scores, *parts[1:], sinks, lengths, key_pages.shape[1])
    # A block of tokens is summed in registers if it has a whole number of entries.
    pooled = (
        _reduced(request.reduce, request.unit, *sums)
        if _TOKENS % request.unit == 0
        else _reduced(request.reduce, 1, *sums).unflatten(2, (-1, request.unit)).sum(3)
        for request in requests
    )
    return joined(*parts, sinks, query.dtype), tuple(pooled)


def head_scores(
    query: Tensor, key_pages: Tensor, page_table: Tensor, lengths: Tensor, *, scale: float
) -> Tensor:
    """As the reference."""
    paged = PagedQuery(query, key_pages, key_pages, page_table, lengths)
    scores, parts = _scored(paged, scale, None, values=False)
    return _reduced("group_max", 1, scores, *parts[1:], None, lengths, key_pages.shape[1])

"""A retrieval head's scores of every cached token, for the KV heads of its target."""

from __future__ import annotations

from torch import Tensor

from keyhole import kernels
from keyhole.kernels import Selection


def group_weights(
    query: Tensor,
    key_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    groups: int,
    scale: float,
    there: Selection | None = None,
) -> Tensor:
    """Softmax weights, the largest of each group: float32 [B, groups, N].

    query [B, heads, D], key_pages [P, Hkv, page_size, D] of the head; page_table int32 [B, M],
    lengths int32 [B]; N = M * page_size. The head's query heads meet `groups` lists of the target
    by ratio (SpeContext, section 4.2): the largest weight where several meet one, a copy where one
    serves several. there: the existing tokens, where some were dropped (stored documents); the
    softmax covers these alone, and the others score -1.
    """
    batch, heads, dim = query.shape
    kv_heads = key_pages.shape[1]
    lists = min(groups, heads)
    if lists <= kv_heads:
        weights = _scores(query, key_pages, page_table, lengths, scale, there)
        weights = weights.unflatten(1, (lists, -1)).amax(2)
    else:
        # Query heads that share keys but not a list: each part of them as a sequence of its own.
        parts = lists // kv_heads
        query = query.view(batch, kv_heads, parts, -1, dim).transpose(1, 2).flatten(2, 3)
        if there is not None:
            indices, counts = (x.repeat_interleave(parts, 0) for x in (there.indices, there.counts))
            there = Selection(indices, counts, there.unit)
        weights = _scores(
            query.flatten(0, 1).contiguous(),
            key_pages,
            page_table.repeat_interleave(parts, 0),
            lengths.repeat_interleave(parts),
            scale,
            there,
        )
        weights = weights.unflatten(0, (batch, parts)).transpose(1, 2).flatten(1, 2)
    spread: Tensor = weights.repeat_interleave(groups // lists, 1)
    return spread


def _scores(
    query: Tensor,
    key_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    there: Selection | None,
) -> Tensor:
    paged = (query, key_pages, page_table, lengths)
    if there is None:
        return kernels.head_scores(*paged, scale=scale)
    return kernels.head_scores_chosen(*paged, selection=there, scale=scale)

"""Attention over tokens at any positions of a sequence, as stored documents need it.

Prompts made of stored documents have gaps, and their tokens are computed at any positions between
others. These operations gather the tokens that they read and are PyTorch on every device; a decode
step over such a prompt is `attend` with a selection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels import reference
from keyhole.kernels.reference import attention
from keyhole.kernels.selection import ScoreRequest, Selection


def gather_tokens(pages_of: Tensor, pages: Tensor, tokens: Tensor) -> Tensor:
    """Keys or values of some tokens of a sequence, [n, Hkv, D], a copy.

    pages_of [P, Hkv, page_size, D]; pages int64 [M], the sequence's pages in order; tokens int64.
    """
    size = pages_of.shape[2]
    place = pages[tokens // size].to(pages_of.device), (tokens % size).to(pages_of.device)
    return pages_of[place[0], :, place[1]].to(tokens.device)


def sparse_prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    positions: Tensor,
    chosen: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of tokens at `positions` over the `chosen` tokens not after them, [T, Hq, Dv].

    query [T, Hq, D]; pages int64 [M], the sequence's pages in order; positions int64 [T]; chosen
    int64 [n], ascending, all of them written, `positions` among them. The rest as in `prefill`.
    """
    if window is not None:
        chosen = chosen[chosen > positions.min() - window]
    key, value = (gather_tokens(x, pages, chosen).transpose(0, 1) for x in (key_pages, value_pages))
    seen = chosen <= positions[:, None]
    if window is not None:
        seen &= chosen > positions[:, None] - window
    grouped = query.unflatten(1, (key.shape[0], -1)).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
    if softcap is None and sinks is None:
        mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
        # Without a batch dimension torch does not use its fused kernels for float32 products.
        parts = [
            F.scaled_dot_product_attention(
                part[None], key[None], value[None], attn_mask=mask, scale=scale
            )[0]
            for part in grouped.unbind(1)
        ]
        out = torch.stack(parts, 1)
    else:
        rows = max(1, attention.MAX_SCORES // (query.shape[1] * len(chosen)))
        blocks = zip(grouped.split(rows, 2), seen.split(rows), strict=True)
        parts = [
            reference.attend_block(block, key, value, mask, scale, softcap, sinks).to(query.dtype)
            for block, mask in blocks
        ]
        out = torch.cat(parts, 2)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def attend_and_score_chosen(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    selection: Selection,
    requests: Sequence[ScoreRequest],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`attend_and_score` over selected tokens; other tokens score 0.

    selection: tokens, one list for all heads.
    """
    assert selection.unit == 1, selection.unit
    assert selection.indices.shape[1] == 1, "one list for all heads"
    out, weights = reference.attend_weights(
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        selection=selection,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
    )
    length = page_table.shape[1] * key_pages.shape[2]
    scores = []
    for request in requests:
        tokens = reference.over_heads(weights, request.reduce)
        places = selection.indices.long().expand_as(tokens)
        tokens = tokens.masked_fill(places < 0, 0.0)
        full = tokens.new_zeros(*tokens.shape[:2], length)
        full.scatter_add_(2, places.clamp(min=0), tokens)
        scores.append(full.unflatten(2, (-1, request.unit)).sum(3))
    return out, tuple(scores)


def head_scores_chosen(
    query: Tensor,
    key_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    selection: Selection,
    scale: float,
) -> Tensor:
    """`head_scores` over selected tokens, float32 [B, Hkv, N]; other tokens score -1.

    selection: tokens, one list for all heads. -1 is below every weight, including weights rounded
    to 0.
    """
    assert selection.unit == 1, selection.unit
    weights = reference.head_scores(
        query, key_pages, page_table, lengths, scale=scale, selection=selection
    )
    places = selection.indices.long().expand_as(weights)
    length = page_table.shape[1] * key_pages.shape[2]
    scores = weights.new_full((*weights.shape[:2], length), -1.0)
    # Padding writes -1 to token 0 by maximum, which does not change it.
    weights = weights.masked_fill(places < 0, -1.0)
    return scores.scatter_reduce_(2, places.clamp(min=0), weights, "amax")

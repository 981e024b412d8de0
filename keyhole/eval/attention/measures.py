"""What is measured of a layer in a step: mass kept, relative error of the output, overlap.

All take one decode step of B sequences and return one number for each, float64 [B].
"""

from __future__ import annotations

import torch
from torch import Tensor


def mass_kept(weights: Tensor, tokens: Tensor) -> Tensor:
    """Share of the attention weights on what is read, mean over query heads.

    weights: float32 [B, Hq, N], 0 past the sequence. tokens: bool [B, H, N]; H divides Hq.
    """
    kept = (weights * _per_query_head(tokens, weights)).sum(2)
    shares: Tensor = kept.double() / weights.sum(2).double()
    return shares.mean(1)


def output_error(full: Tensor, found: Tensor) -> Tensor:
    """||found - full|| / ||full|| over all heads of a layer; [B, Hq, Dv] each."""
    full, found = full.double().flatten(1), found.double().flatten(1)
    error: Tensor = (found - full).norm(dim=1) / full.norm(dim=1)
    return error


def tokens_read(tokens: Tensor, num_kv_heads: int) -> Tensor:
    """Tokens read per KV head, mean over KV heads; what two query heads of one read counts once.

    tokens: bool [B, H, N].
    """
    lists = tokens.shape[1]
    if lists > num_kv_heads:
        tokens = tokens.unflatten(1, (num_kv_heads, -1)).any(2)
    return tokens.sum(2).double().mean(1)


def found_again(wanted: Tensor, among: Tensor) -> Tensor:
    """Share of what is wanted that is found, mean over lists; bool [..., H, N] each, [...]."""
    shares: Tensor = (wanted & among).sum(-1).double() / wanted.sum(-1)
    return shares.mean(-1)


def page_sums(scores: Tensor, page_size: int) -> Tensor:
    """Scores of tokens [B, H, N] summed over pages, [B, H, N / page_size]."""
    sums: Tensor = scores.unflatten(2, (-1, page_size)).sum(3)
    return sums


def members(indices: Tensor, count: int) -> Tensor:
    """Lists of entries [B, H, n], -1 being padding, as bool [B, H, count]."""
    found = torch.zeros(*indices.shape[:2], count + 1, dtype=torch.bool, device=indices.device)
    found.scatter_(2, indices.long().where(indices >= 0, count), True)
    return found[..., :count]


def _per_query_head(tokens: Tensor, weights: Tensor) -> Tensor:
    return tokens.repeat_interleave(weights.shape[1] // tokens.shape[1], 1)

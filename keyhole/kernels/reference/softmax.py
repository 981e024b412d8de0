"""Scores and weights of query heads in the groups of their KV heads."""

from __future__ import annotations

import torch
from torch import Tensor


def in_groups(query: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, D] as [B, Hkv, G, D]."""
    return query.reshape(query.shape[0], num_kv_heads, -1, query.shape[-1])


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Soft-capped scores, c tanh(scores / c); None: the scores unchanged."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of [..., Hkv, G, n], with a sink logit per query head."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().view(scores.shape[1], scores.shape[2], 1)
    column = column.expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]

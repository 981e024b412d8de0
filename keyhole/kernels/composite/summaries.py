"""Scores of what stands for pages, as everybody calls them; their twins say what they are."""

from __future__ import annotations

import torch
from torch import Tensor


def summary_scores(query: Tensor, summaries: Tensor, page_table: Tensor, valid: Tensor) -> Tensor:
    """A query's scores on the vectors of a sequence's pages, float32 [B, Hq, M * n]."""
    scores: Tensor = torch.ops.keyhole.summary_scores(query, summaries, page_table, valid)
    return scores


def spread_scores(
    scores: Tensor, numbers: Tensor, page_table: Tensor, first: int, ends: Tensor
) -> Tensor:
    """The score of what each token belongs to, infinite without one, [B, H, M * page_size]."""
    spread: Tensor = torch.ops.keyhole.spread_scores(scores, numbers, page_table, first, ends)
    return spread

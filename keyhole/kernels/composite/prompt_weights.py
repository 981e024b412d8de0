"""Attention weights among the tokens of a prompt alone."""

from __future__ import annotations

import torch
from torch import Tensor


def prompt_scores(weights: Tensor, prompts: Tensor) -> Tensor:
    """The largest weight that any head gives a token of the prompt, float32 [B, 1, N].

    weights: float32 [B, Hq, N] over all tokens; each head's are divided by their sum over the
    prompt, which is the softmax over the prompt alone. prompts: int32 [B], tokens of each prompt;
    what comes after them scores 0.
    """
    position = torch.arange(weights.shape[2], device=weights.device)
    own = weights.masked_fill(position >= prompts[:, None, None], 0.0)
    least = torch.finfo(torch.float32).tiny  # a head may give all its weight to newer tokens
    return (own / own.sum(2, keepdim=True).clamp(min=least)).amax(1, keepdim=True)

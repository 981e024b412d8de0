"""Linear layers and RoPE."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + bias; x [..., I], weight [O, I], bias [O]. Fast for a few tokens."""
    return F.linear(x, weight, bias)


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [B, Hq, T, D] and keys [B, Hkv, T, D], each pair (i, i + D / 2) rotated by its angle.

    RoPE (Su et al., RoFormer, arXiv 2104.09864, section 3.2.2, eq. 34) as transformers computes it,
    with its roundings: cos and sin [B or 1, T, D] in the same dtype, with equal halves.
    """
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turned(query), turned(key)

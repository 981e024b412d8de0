"""Layers of a model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + bias; x [..., I], weight [O, I], bias [O]. Made for a few tokens, right for any."""
    return F.linear(x, weight, bias)

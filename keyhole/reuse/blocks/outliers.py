"""Blocks that matter far more than the others of their document and layer."""

from __future__ import annotations

import torch
from torch import Tensor


def outliers(alpha: Tensor, sigmas: float = 3.0) -> Tensor:
    """Where alpha is an outlier by the PauTa criterion: alpha < mean - sigmas std, bool [..., N].

    alpha [..., N], of the blocks of a document and layer; smaller is more important. Mean and
    standard deviation (divided by n) are over the finite ones; an infinite one is no outlier. One
    of n numbers is at most sqrt(n - 1) deviations from their mean, so that with 3 sigmas an outlier
    needs at least 11 blocks (SamKV, appendix A.1).
    """
    finite = alpha.isfinite()
    number = finite.sum(-1, keepdim=True).clamp(min=1)
    known = torch.where(finite, alpha.double(), 0.0)
    mean = known.sum(-1, keepdim=True) / number
    spread = torch.where(finite, known - mean, 0.0).square().sum(-1, keepdim=True) / number
    # The last condition excludes outliers that only rounding can produce.
    return finite & (known < mean - sigmas * spread.sqrt()) & (number - 1 > sigmas**2)

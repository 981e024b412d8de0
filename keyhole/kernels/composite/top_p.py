"""As much of a choice as its scores' mass asks for: what is left when the weakest entries go."""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.kernels.selection import Selection


def trim(
    chosen: Selection,
    scores: Tensor,
    valid: Tensor,
    share: float,
    *,
    least: int = 0,
    first: int = 0,
    last: int = 0,
) -> Selection:
    """The fewest best entries of a choice whose scores sum to a share of all scores, same shape.

    The `first` and `last` entries of a sequence stay and count; `least` entries are left at least.
    A choice that does not reach the share stays whole. chosen [B, H, k], of `top_k` with the
    same scores float32 [B, H, n], which count as 0 below 0, and valid int32 [B]. No host sync.
    """
    entry = torch.arange(scores.shape[-1], device=scores.device)
    count = valid.long()[:, None, None]
    wanted = share * scores.clamp(min=0).masked_fill(entry >= count, 0).sum(-1, keepdim=True)
    indices = chosen.indices.long()
    real = indices >= 0
    own = scores.gather(-1, indices.clamp(min=0)).clamp(min=0).masked_fill(~real, 0)
    forced = real & ((indices < first) | (indices >= count - last))
    # Padding goes last, behind entries whose score is 0.
    rank = own.masked_fill(~real, -1).masked_fill(forced, float("inf"))
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    sorted_own = own.gather(-1, order)
    before = sorted_own.cumsum(-1) - sorted_own
    place = torch.arange(indices.shape[-1], device=indices.device)
    needed = torch.empty_like(real).scatter_(-1, order, (before < wanted) | (place < least))
    left = real & (needed | forced)
    nowhere = scores.shape[-1]
    found = indices.masked_fill(~left, nowhere).sort(dim=-1).values
    found = found.masked_fill(found == nowhere, -1).to(torch.int32)
    return Selection(found, left.sum(-1).to(torch.int32), chosen.unit)

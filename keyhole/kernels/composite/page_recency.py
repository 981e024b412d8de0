"""Stamps of pages: when each was last of use, and which one has not been for longest (RaaS).

Stamps int32 [slots, n] belong to the last pages of a sequence, those after its first `pinned` ones.
rows int64 [B]: whose stamps; pages int32 [B], pinned int64 [B]: pages of each sequence, and those
without a stamp. Plain PyTorch on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def renew_stamps(
    stamps: Tensor,
    rows: Tensor,
    pinned: Tensor,
    pages: Tensor,
    now: Tensor,
    weights: Tensor | None,
    alpha: float,
) -> None:
    """Stamps the last page, and those of more weight than alpha, in place.

    now int32 [B]: what to write. weights float32 [B, M], of all pages of each sequence; None: none
    has any.
    """
    place = torch.arange(stamps.shape[1], device=stamps.device)
    newest = (pages - pinned - 1)[:, None]
    renewed = place == newest
    if weights is not None:
        entries = (pinned[:, None] + place).clamp(max=weights.shape[1] - 1)
        renewed |= (place < newest) & (weights.gather(1, entries) > alpha)
    stamps[rows] = torch.where(renewed, now[:, None], stamps[rows])


def drop_oldest(stamps: Tensor, rows: Tensor, pinned: Tensor, pages: Tensor, due: Tensor) -> Tensor:
    """The page of the oldest stamp, the earlier of equals: int64 [B], counted after the pinned.

    Where bool [B] due says that it goes, its stamp is taken out, in place.
    """
    old = stamps[rows]
    place = torch.arange(old.shape[1], device=old.device)
    there = place < (pages - pinned)[:, None]
    # Stamp and place in one number, as argmin may take any of equals.
    order = old.long() * len(place) + place
    oldest = order.masked_fill(~there, torch.iinfo(torch.int64).max).argmin(1)
    later = place + (due[:, None] & (place >= oldest[:, None]))
    stamps[rows] = old.gather(1, later.clamp(max=len(place) - 1))
    return oldest

"""A choice of tokens that is kept for several steps, and the tokens generated meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels.selection import Selection


def keep(
    state: Mapping[str, Tensor], rows: Tensor, due: Tensor, made: Selection, lengths: Tensor
) -> None:
    """Stores what was chosen for the sequences that are due, in place.

    state: "chosen" int32 [slots, H, n], "counts" [slots, H] and "length" [slots], the length it was
    chosen at. rows int64 [B], their slots; due bool [B]; made [B, H, n]; lengths int32 [B].
    """
    news = {"chosen": made.indices, "counts": made.counts, "length": lengths}
    for name, new in news.items():
        wanted = due.view(-1, *[1] * (new.dim() - 1))
        state[name][rows] = torch.where(wanted, new, state[name][rows])


def kept(state: Mapping[str, Tensor], rows: Tensor, lengths: Tensor, most: int) -> Selection:
    """The stored choice and every token since, at most `most` of them: [B, H, n + most]."""
    chosen, counts, made_at = (state[name][rows] for name in ("chosen", "counts", "length"))
    return with_newer(Selection(chosen, counts, 1), made_at, lengths, most)


def with_newer(made: Selection, made_at: Tensor, lengths: Tensor, most: int) -> Selection:
    """A choice of tokens and every token since, at most `most` of them: [B, H, n + most].

    made_at int32 [B]: the length it was made at; lengths int32 [B]: of now.
    """
    chosen, counts = made.indices, made.counts
    since = torch.arange(most, device=chosen.device)
    new = made_at[:, None] + since  # [B, most]
    there = (new < lengths[:, None])[:, None].expand(-1, chosen.shape[1], -1)
    indices = F.pad(chosen, (0, most + 1), value=-1)
    # What is not there yet goes to a column of its own, which is cut off.
    place = torch.where(there, counts[..., None] + since, indices.shape[-1] - 1)
    new = new[:, None].expand_as(there).to(indices.dtype)
    indices = indices.scatter(-1, place, new)[..., :-1].contiguous()
    return Selection(indices, (counts + there.sum(-1)).to(torch.int32), 1)

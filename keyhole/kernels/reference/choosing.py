"""Bounds and scores of pages, and top-k."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels.reference.pages import gathered
from keyhole.kernels.reference.softmax import in_groups
from keyhole.kernels.selection import Selection


def page_bounds(
    key_pages: Tensor, low: Tensor, high: Tensor, pages: Tensor, filled: Tensor
) -> None:
    """Elementwise bounds of the keys of some pages, written in place (Quest, arXiv 2406.10774).

    low, high [P, Hkv, D]; pages int64 [n]; filled int64 [n]: tokens that each page holds now, >= 1.
    """
    keys = gathered(key_pages, (pages,), low.device)
    places = torch.arange(keys.shape[2], device=keys.device)
    empty = (places >= filled[:, None])[:, None, :, None]
    low[pages] = keys.masked_fill(empty, float("inf")).amin(2)
    high[pages] = keys.masked_fill(empty, float("-inf")).amax(2)


def bound_scores(query: Tensor, low: Tensor, high: Tensor, page_table: Tensor) -> Tensor:
    """sum_d max(q_d low_d, q_d high_d), the largest over each group of query heads.

    query [B, Hq, D]; low, high [P, Hkv, D]; page_table int32 [B, M]. Returns float32 [B, Hkv, M];
    entries beyond a sequence's pages are undefined.
    """
    num_kv_heads = low.shape[1]
    head = torch.arange(num_kv_heads, device=low.device)[None, :, None]
    where = page_table.long()[:, None], head
    grouped = in_groups(query.float(), num_kv_heads)
    # A positive q_d is bounded by high_d, a negative one by low_d.
    bound = grouped.clamp(min=0) @ high[where].float().transpose(-1, -2)
    bound += grouped.clamp(max=0) @ low[where].float().transpose(-1, -2)
    return bound.amax(2)


def top_k(
    scores: Tensor, valid: Tensor, k: int, unit: int, *, first: int = 0, last: int = 0
) -> Selection:
    """The k best entries of each row; equal scores go to the earlier entry, NaN is the largest.

    scores float32 [B, H, n]; valid int32 [B]: entries from there on do not exist. The `first` and
    `last` entries of a sequence are taken before all others (first + last <= k).
    """
    entry = torch.arange(scores.shape[-1], device=scores.device)
    count = valid.long()[:, None, None]
    forced = (entry < first) | (entry >= count - last)
    scores = scores.masked_fill(forced, float("inf"))
    scores = scores.masked_fill(entry >= count, float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    counts = valid.clamp(max=k).to(torch.int32)[:, None].expand(scores.shape[:2])
    nowhere = scores.shape[-1]
    rank = torch.arange(best.shape[-1], device=scores.device)
    best = best.masked_fill(rank >= counts[..., None], nowhere).sort(dim=-1).values
    indices = best.masked_fill(best == nowhere, -1).to(torch.int32)
    return Selection(F.pad(indices, (0, k - indices.shape[-1]), value=-1), counts, unit)


def recent_indices(lengths: Tensor, k: int, *, first: int = 0) -> Selection:
    """The `first` tokens and the newest k - first of each sequence; all tokens if it has at most k.

    lengths int32 [B]. Returns token positions shared by all heads, [B, 1, k].
    """
    entry = torch.arange(k, device=lengths.device)[None]
    length = lengths.long()[:, None]
    skipped = (length - k).clamp(min=0) * (entry >= first)
    indices = (entry + skipped).masked_fill(entry >= length, -1)
    return Selection(indices.int()[:, None], lengths.clamp(max=k).int()[:, None], 1)


def members(listed: Tensor, count: int) -> Tensor:
    """Which of `count` entries are in lists [..., n], padded with -1. Bool [..., count]."""
    found = listed.new_zeros(*listed.shape[:-1], count + 1, dtype=torch.bool)
    found.scatter_(-1, listed.long().where(listed >= 0, count), True)
    there: Tensor = found[..., :count]
    return there

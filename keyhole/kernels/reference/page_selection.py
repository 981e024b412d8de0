"""Bounds and summaries of pages, their scores, top-k and top-p."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels.reference.attention import in_groups
from keyhole.kernels.reference.pages import gathered
from keyhole.kernels.reference.quantised import dequantised
from keyhole.kernels.selection import Selection


def page_bounds(
    key_pages: Tensor, low: Tensor, high: Tensor, pages: Tensor, filled: Tensor
) -> None:
    """Elementwise bounds of the keys of some pages, written in place (Quest, arXiv 2406.10774).

    low, high [P, Hkv, D]; pages int64 [n]; filled int64 [n]: tokens that each page holds now, >= 1.
    """
    keys = dequantised(gathered(key_pages, (pages,), low.device))
    places = torch.arange(keys.shape[2], device=keys.device)
    empty = (places >= filled[:, None])[:, None, :, None]
    low[pages] = keys.masked_fill(empty, float("inf")).amin(2).to(low.dtype)
    high[pages] = keys.masked_fill(empty, float("-inf")).amax(2).to(high.dtype)


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
    counts = valid.clamp(max=k).to(torch.int32)[:, None].repeat(1, scores.shape[1])
    nowhere = scores.shape[-1]
    rank = torch.arange(best.shape[-1], device=scores.device)
    best = best.masked_fill(rank >= counts[..., None], nowhere).sort(dim=-1).values
    indices = best.masked_fill(best == nowhere, -1).to(torch.int32)
    return Selection(F.pad(indices, (0, k - indices.shape[-1]), value=-1), counts, unit)


def top_p(
    chosen: Selection,
    scores: Tensor,
    valid: Tensor,
    share: float,
    *,
    least: int = 0,
    first: int = 0,
    last: int = 0,
) -> Selection:
    """The fewest best entries of a selection whose scores sum to a share of all, same shape.

    The `first` and `last` entries of a sequence are always kept and counted; at least `least`
    entries remain. A selection that does not reach the share is returned unchanged. chosen [B, H,
    k], of `top_k` with the same scores float32 [B, H, n], which count as 0 below 0, and valid int32
    [B]. No host sync.
    """
    entry = torch.arange(scores.shape[-1], device=scores.device)
    count = valid.long()[:, None, None]
    wanted = share * scores.clamp(min=0).masked_fill(entry >= count, 0).sum(-1, keepdim=True)
    indices = chosen.indices.long()
    real = indices >= 0
    own = scores.gather(-1, indices.clamp(min=0)).clamp(min=0).masked_fill(~real, 0)
    forced = real & ((indices < first) | (indices >= count - last))
    # Padding sorts last, after entries whose score is 0.
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


def recent_indices(lengths: Tensor, k: int, *, first: int = 0) -> Selection:
    """The `first` tokens and the newest k - first of each sequence; all tokens if it has at most k.

    lengths int32 [B]. Returns token positions shared by all heads, [B, 1, k].
    """
    entry = torch.arange(k, device=lengths.device)[None]
    length = lengths.long()[:, None]
    skipped = (length - k).clamp(min=0) * (entry >= first)
    indices = (entry + skipped).masked_fill(entry >= length, -1)
    return Selection(indices.int()[:, None], lengths.clamp(max=k).int()[:, None], 1)


def summary_scores(query: Tensor, summaries: Tensor, page_table: Tensor, valid: Tensor) -> Tensor:
    """Products q . s for the vectors s of a sequence's pages in order, float32 [B, Hq, M * n].

    query [B, Hq, D]; summaries [P, n, Hkv, D], n of each page; page_table int32 [B, M]; valid int32
    [B]: later entries are undefined.
    """
    heads, dim = summaries.shape[2:]
    # Taking rows of a matrix is several times as fast as indexing.
    rows = summaries.flatten(1).index_select(0, page_table.flatten())
    vectors = rows.view(len(query), -1, heads, dim).transpose(1, 2).float()  # [B, Hkv, M * n, D]
    return (in_groups(query.float(), heads) @ vectors.transpose(-1, -2)).flatten(1, 2)


def spread_scores(
    scores: Tensor, numbers: Tensor, page_table: Tensor, first: int, ends: Tensor
) -> Tensor:
    """The score of each token's page or cluster, float32 [B, H, M * page_size].

    scores float32 [B, H, n]; numbers [P, H, page_size], each token's index into `scores`, int16 or
    int32; page_table int32 [B, M]; ends int32 [B]: tokens before `first` and from `ends` on belong
    to no entry, whatever their numbers, and neither do tokens whose number is not below n; their
    scores are infinite.
    """
    _, heads, size = numbers.shape
    rows = numbers.flatten(1).index_select(0, page_table.flatten())
    of_token = rows.view(len(scores), -1, heads, size).transpose(1, 2).flatten(2).long()
    place = torch.arange(of_token.shape[2], device=of_token.device)
    loose = ((place < first) | (place >= ends[:, None]))[:, None]
    loose = loose | (of_token < 0) | (of_token >= scores.shape[2])
    spread: Tensor = scores.gather(2, of_token.masked_fill(loose, 0))
    return spread.masked_fill(loose, float("inf"))

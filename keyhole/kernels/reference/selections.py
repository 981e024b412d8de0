"""Operations on selections: kept for several steps, cut to a top-p, scored by page summaries."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels.selection import Selection


def keep(
    state: Mapping[str, Tensor], rows: Tensor, due: Tensor, made: Selection, lengths: Tensor
) -> None:
    """Stores the selection of the sequences that are due, in place.

    state: "chosen" int32 [slots, H, n], "counts" [slots, H] and "length" [slots], the sequence
    length at which it was made. rows int64 [B], their slots; due bool [B]; made [B, H, n]; lengths
    int32 [B].
    """
    news = {"chosen": made.indices, "counts": made.counts, "length": lengths}
    for name, new in news.items():
        wanted = due.view(-1, *[1] * (new.dim() - 1))
        state[name][rows] = torch.where(wanted, new, state[name][rows])


def kept(state: Mapping[str, Tensor], rows: Tensor, lengths: Tensor, most: int) -> Selection:
    """The stored selection and every token since, at most `most` of them: [B, H, n + most]."""
    chosen, counts, made_at = (state[name][rows] for name in ("chosen", "counts", "length"))
    return with_newer(Selection(chosen, counts, 1), made_at, lengths, most)


def with_newer(made: Selection, made_at: Tensor, lengths: Tensor, most: int) -> Selection:
    """A selection of tokens and every token since, at most `most` of them: [B, H, n + most].

    made_at int32 [B]: the length at which it was made; lengths int32 [B]: the current one.
    """
    chosen, counts = made.indices, made.counts
    since = torch.arange(most, device=chosen.device)
    new = made_at[:, None] + since  # [B, most]
    there = (new < lengths[:, None])[:, None].expand(-1, chosen.shape[1], -1)
    indices = F.pad(chosen, (0, most + 1), value=-1)
    # Tokens that do not exist yet go to an extra column, which is cut off.
    place = torch.where(there, counts[..., None] + since, indices.shape[-1] - 1)
    new = new[:, None].expand_as(there).to(indices.dtype)
    indices = indices.scatter(-1, place, new)[..., :-1].contiguous()
    return Selection(indices, (counts + there.sum(-1)).to(torch.int32), 1)


# Time stamps of pages: when each last received attention, and the page of the oldest stamp (RaaS).
#
# Stamps int32 [slots, n] belong to the pages of a sequence after its first `pinned` ones.
# rows int64 [B]: whose stamps; pages int32 [B], pinned int64 [B]: pages of each sequence, and those
# without a stamp. Plain PyTorch on every device.


def renew_stamps(
    stamps: Tensor,
    rows: Tensor,
    pinned: Tensor,
    pages: Tensor,
    now: Tensor,
    weights: Tensor | None,
    alpha: float,
) -> None:
    """Stamps the last page, and pages whose weight exceeds alpha, in place.

    now int32 [B]: the stamp. weights float32 [B, M], of all pages of each sequence; None: stamp
    only the last page.
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


def prompt_scores(weights: Tensor, prompts: Tensor) -> Tensor:
    """The largest weight of any head on each token of the prompt, float32 [B, 1, N].

    weights: float32 [B, Hq, N] over all tokens; each head's are divided by their sum over the
    prompt, which is the softmax over the prompt alone. prompts: int32 [B], tokens of each prompt;
    later tokens score 0.
    """
    position = torch.arange(weights.shape[2], device=weights.device)
    own = weights.masked_fill(position >= prompts[:, None, None], 0.0)
    least = torch.finfo(torch.float32).tiny  # a head may put all its weight on newer tokens
    return (own / own.sum(2, keepdim=True).clamp(min=least)).amax(1, keepdim=True)


def summary_scores(query: Tensor, summaries: Tensor, page_table: Tensor, valid: Tensor) -> Tensor:
    """A query's scores on the vectors of a sequence's pages, float32 [B, Hq, M * n]."""
    scores: Tensor = torch.ops.keyhole.summary_scores(query, summaries, page_table, valid)
    return scores


def spread_scores(
    scores: Tensor, numbers: Tensor, page_table: Tensor, first: int, ends: Tensor
) -> Tensor:
    """The score of each token's page or cluster, infinite without one, [B, H, M * page_size]."""
    spread: Tensor = torch.ops.keyhole.spread_scores(scores, numbers, page_table, first, ends)
    return spread

"""Selections kept for several steps, page recency (RaaS), and attention over selected tokens.

Prompts made of stored documents have gaps. A decode step over one is `attend` with a selection of
the tokens that it has; the same with scores gathers these tokens, in PyTorch on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels import reference
from keyhole.kernels.selection import PagedQuery, ScoreRequest, Selection


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
    """The page with the oldest stamp, int64 [B], counted after the pinned pages; ties: the earlier.

    Where bool [B] due is set, removes its stamp in place.
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


def attend_and_score_chosen(
    paged: PagedQuery,
    *,
    selection: Selection,
    requests: Sequence[ScoreRequest],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`attend_and_score` over selected tokens; other tokens score 0.

    selection: tokens, one list for all heads.
    """
    assert selection.unit == 1, selection.unit
    assert selection.indices.shape[1] == 1, "one list for all heads"
    out, weights = reference.attend_weights(paged, selection, scale, softcap, sinks)
    _, key_pages, _, page_table, _ = paged
    length = page_table.shape[1] * key_pages.shape[2]
    scores = []
    for request in requests:
        tokens = reference.over_heads(weights, request.reduce)
        places = selection.indices.long().expand_as(tokens)
        tokens = tokens.masked_fill(places < 0, 0.0)
        full = tokens.new_zeros(*tokens.shape[:2], length)
        full.scatter_add_(2, places.clamp(min=0), tokens)
        scores.append(full.unflatten(2, (-1, request.unit)).sum(3))
    return out, tuple(scores)


def head_scores_chosen(
    query: Tensor,
    key_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    selection: Selection,
    scale: float,
    unpaged: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`head_scores` over selected tokens, float32 [B, Hkv, N]; other tokens score -1.

    selection: tokens, one list for all heads. -1 is below every weight, including weights rounded
    to 0. unpaged: keys [S, Hkv, D] of tokens without a page, and int32 [B, C], which of them
    belongs to each of the first C tokens; -1: its key is in its page.
    """
    assert selection.unit == 1, selection.unit
    if unpaged is None:
        paged = (query, key_pages, page_table, lengths)
        weights = reference.weights_over(*paged, selection, scale).amax(2)
    else:
        assert selection.indices.shape[1] == 1, "one list for all heads"
        keys = _keys_of(selection.indices[:, 0], key_pages, page_table, *unpaged)
        scores = query.float().unflatten(1, (keys.shape[1], -1)) @ keys.float().transpose(-1, -2)
        missing = selection.indices[:, :, None] < 0
        weights = (scores * scale).masked_fill(missing, float("-inf")).softmax(-1).amax(2)
    places = selection.indices.long().expand_as(weights)
    length = page_table.shape[1] * key_pages.shape[2]
    scores = weights.new_full((*weights.shape[:2], length), -1.0)
    # Padding writes -1 to token 0 by maximum, which does not change it.
    weights = weights.masked_fill(places < 0, -1.0)
    return scores.scatter_reduce_(2, places.clamp(min=0), weights, "amax")


def _keys_of(
    tokens: Tensor, key_pages: Tensor, page_table: Tensor, unpaged: Tensor, slots: Tensor
) -> Tensor:
    """Keys of tokens int32 [B, n], [B, Hkv, n, D]; of padding, any numbers."""
    known, size = tokens.clamp(min=0).long(), key_pages.shape[2]
    pages = page_table.gather(1, known // size).long()
    slot = slots.gather(1, known.clamp(max=slots.shape[1] - 1))
    slot = slot.masked_fill(known >= slots.shape[1], -1).long()
    paged = key_pages[pages, :, known % size]
    keys = torch.where((slot >= 0)[..., None, None], unpaged[slot.clamp(min=0)], paged)
    return keys.transpose(1, 2)

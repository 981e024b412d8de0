"""The operations in plain PyTorch: the definition that every other backend is tested against.

They run on any device and in any float dtype; scores and softmax are float32. `attend` gathers only
what is selected. Pages may hold anything (NaN too) where no token was written. They may also lie on
another device than the operands (a layer on the lower tier of a GPU); what is gathered there, block
by block, is then copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels.selection import ScoreRequest, Selection

# The explicit path of `prefill` holds at most this many scores at once (256 MiB in float32).
MAX_SCORES = 1 << 26

# Numbers of keys or values gathered at once. On a CPU small buffers stay in the caches: at 32k
# tokens this is seven times as fast as gathering all (benchmarks/LOG.md). A GPU wants few and large
# steps.
_GATHERED = {"cpu": 1 << 19}
_GATHERED_ELSEWHERE = 1 << 26


def append(
    key_pages: Tensor,
    value_pages: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
) -> None:
    """Writes new tokens into their pages, in place.

    key_pages [P, Hkv, page_size, D], key [T, Hkv, D]; value_pages [P, Hkv, page_size, Dv] and
    value [T, Hkv, Dv], or None for both where values are part of the keys; slots int64 [T]:
    page * page_size + place.
    """
    page_size = key_pages.shape[2]
    slots = slots.to(key_pages.device)
    page, place = slots // page_size, slots % page_size
    key_pages[page, :, place] = key.to(key_pages.device)
    if value_pages is not None and value is not None:
        value_pages[page, :, place] = value.to(value_pages.device)


def attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    selection: Selection | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest token: softmax(scale q K^T) V over what is selected.

    query [B, Hq, D]; key_pages [P, Hkv, page_size, D]; value_pages [P, Hkv, page_size, Dv];
    page_table int32 [B, M]; lengths int32 [B], the newest token included. selection None: all.
    window w: the last w tokens only. softcap c: scores become c tanh(score / c). sinks [Hq]: one
    more logit per head that takes weight and gives no value. Returns [B, Hq, Dv] in query's dtype.
    """
    if selection is None and window is not None:
        selection = _window_pages(lengths, window, key_pages.shape[2], page_table.shape[1])
    return attend_weights(
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        scale=scale,
        selection=selection,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )[0]


def attend_weights(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    selection: Selection | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend`, and its weights, float32 [B, Hkv, G, n] over the n tokens of the selection."""
    reads = _reads(key_pages, page_table, lengths, selection, window)
    weights = _weights(query, key_pages, reads, scale, softcap, sinks)
    return _mix(weights, value_pages, reads).to(query.dtype), weights


def attend_and_score(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    requests: tuple[ScoreRequest, ...],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`attend` over everything, and for each request the reduced weights, float32 [B, H, n].

    H = Hkv for "group_max", Hq for "none", else 1; n = M * page_size / unit; entries past the
    sequence are 0.
    """
    paged = (query, key_pages, value_pages, page_table, lengths)
    out, weights = attend_weights(*paged, scale=scale, softcap=softcap, sinks=sinks)
    scores = (
        over_heads(weights, request.reduce).unflatten(2, (-1, request.unit)).sum(3)
        for request in requests
    )
    return out, tuple(scores)


def over_heads(weights: Tensor, reduce: str) -> Tensor:
    """Weights [B, Hkv, G, n] reduced over query heads, [B, Hkv, Hq or 1, n]."""
    if reduce == "group_max":
        return weights.amax(2)
    weights = weights.flatten(1, 2)
    if reduce == "none":
        return weights
    return weights.amax(1, keepdim=True) if reduce == "max" else weights.sum(1, keepdim=True)


def head_scores(
    query: Tensor,
    key_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    selection: Selection | None = None,
) -> Tensor:
    """Attention weights of each query head, the largest of each group: float32 [B, Hkv, N].

    query [B, Hq, D], key_pages [P, Hkv, page_size, D], N = M * page_size. Entries past the sequence
    are 0. What a retrieval head chooses tokens by (SpeContext, section 4.2). selection: the weights
    are over its tokens alone, and N is as many as it lists.
    """
    reads = _reads(key_pages, page_table, lengths, selection, None)
    return _weights(query, key_pages, reads, scale, None, None).amax(2)


@dataclass(frozen=True)
class _Reads:
    """What a decode step reads, as indices into pages.

    where: the index of n entries (pages or tokens) per sequence and KV head. size: tokens of an
    entry. valid: bool [B, Hkv or 1, n * size], False where there is no token or it is not seen.
    """

    where: tuple[Tensor, ...]
    size: int
    valid: Tensor

    def blocks(self, pages: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Parts of the keys or values, float32 [B, Hkv, m, D], and the tokens that they are."""
        entries = self.valid.shape[-1] // self.size
        numbers = self.valid.shape[0] * pages.shape[1] * self.size * pages.shape[-1]
        step = max(1, _GATHERED.get(pages.device.type, _GATHERED_ELSEWHERE) // numbers)
        for start in range(0, entries, step):
            end = min(start + step, entries)
            index = tuple(i[..., start:end] if i.shape[-1] == entries else i for i in self.where)
            part = gathered(pages, index, self.valid.device)
            part = part.flatten(2, 3) if part.dim() > 4 else part  # whole pages
            yield part.float(), slice(start * self.size, end * self.size)


def _reads(
    key_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    selection: Selection | None,
    window: int | None,
) -> _Reads:
    position, where = _places(page_table, selection, key_pages.shape[1], key_pages.shape[2])
    valid = (position >= 0) & (position < lengths[:, None, None])
    if window is not None:
        valid &= position >= (lengths - window)[:, None, None]
    size = key_pages.shape[2] if selection is None else selection.unit
    return _Reads(where, size, valid.expand(len(lengths), -1, -1))


def _weights(
    query: Tensor,
    key_pages: Tensor,
    reads: _Reads,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention weights, float32 [B, Hkv, G, n]."""
    grouped = _grouped(query.float(), key_pages.shape[1])
    scores = grouped.new_empty(*grouped.shape[:3], reads.valid.shape[-1])
    for key, tokens in reads.blocks(key_pages):
        scores[..., tokens] = grouped @ key.transpose(-1, -2)
    scores = _cap(scores.mul_(scale), softcap)
    scores.masked_fill_(~reads.valid[:, :, None], float("-inf"))
    return _softmax(scores, sinks)


def _mix(weights: Tensor, value_pages: Tensor, reads: _Reads) -> Tensor:
    """Values under weights [B, Hkv, G, n], float32 [B, Hq, Dv]."""
    out = weights.new_zeros(*weights.shape[:3], value_pages.shape[-1])
    for value, tokens in reads.blocks(value_pages):
        # What was gathered is a copy. Where no token was written it may hold NaN.
        value.masked_fill_(~reads.valid[..., tokens, None], 0.0)
        out += weights[..., tokens] @ value
    return out.flatten(1, 2)


def _places(
    page_table: Tensor, selection: Selection | None, num_kv_heads: int, page_size: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Token positions [B, Hkv or 1, n] (negative: padding) and the index that reads them."""
    head = torch.arange(num_kv_heads, device=page_table.device)[None, :, None]
    place = torch.arange(page_size, device=page_table.device)
    table = page_table.long()[:, None]
    if selection is None:
        pages = torch.arange(page_table.shape[1], device=page_table.device)[None, None]
        position = (pages[..., None] * page_size + place).flatten(2)
        return position, (table, head)
    indices = selection.indices.long()
    table = table.expand(-1, indices.shape[1], -1)
    safe = indices.clamp(min=0)
    if selection.unit == 1:
        physical = table.gather(2, safe // page_size)
        return indices, (physical, head, safe % page_size)
    physical = table.gather(2, safe)
    position = indices[..., None] * page_size + place
    return position.flatten(2), (physical, head)


def _window_pages(lengths: Tensor, window: int, page_size: int, num_pages: int) -> Selection | None:
    """The pages that hold the last `window` tokens; None where that may be all of them."""
    count = (window + page_size - 2) // page_size + 1
    if count >= num_pages:
        return None
    last = (lengths.long() - 1) // page_size
    back = torch.arange(count - 1, -1, -1, device=lengths.device)
    first = (last + 1 - count).clamp(min=0)
    indices = first[:, None] + (count - 1 - back)
    indices = indices.masked_fill(indices > last[:, None], -1)
    counts = (indices >= 0).sum(1, dtype=torch.int32)
    return Selection(indices.int()[:, None], counts[:, None], page_size)


def gathered(pages: Tensor, index: tuple[Tensor, ...], device: torch.device) -> Tensor:
    """What is at `index`, on `device`, wherever the pages are."""
    return pages[tuple(i.to(pages.device) for i in index)].to(device)


def _grouped(query: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, D] as [B, Hkv, G, D]."""
    return query.reshape(query.shape[0], num_kv_heads, -1, query.shape[-1])


def _cap(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of [..., Hkv, G, n], with a sink logit per query head."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().view(scores.shape[1], scores.shape[2], 1)
    column = column.expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one sequence's tokens start .. start + T - 1 over its pages.

    query [T, Hq, D]; pages int64 [M], the sequence's pages in order, that hold start + T tokens.
    window, softcap, sinks as in `attend`. Returns [T, Hq, Dv] in query's dtype.
    """
    page_size, num_kv_heads = key_pages.shape[2], key_pages.shape[1]
    end = start + query.shape[0]
    skipped = 0 if window is None else max(0, start - window + 1) // page_size
    pages = pages[skipped : -(-end // page_size)]
    first = skipped * page_size
    key, value = (
        gathered(x, (pages,), query.device).transpose(0, 1).flatten(1, 2)[:, : end - first]
        for x in (key_pages, value_pages)
    )
    grouped = _grouped(query, num_kv_heads).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
    position = torch.arange(first, end, device=query.device)
    row = torch.arange(start, end, device=query.device)[:, None]
    seen = position <= row if window is None else (position <= row) & (position > row - window)
    if softcap is None and sinks is None:
        # The query heads of a group are folded into one row, so that no key is copied per head.
        folded = grouped.flatten(1, 2)[None]
        mask = seen.repeat(grouped.shape[1], 1)
        out = F.scaled_dot_product_attention(
            folded, key[None], value[None], attn_mask=mask, scale=scale
        )
        out = out.view(*grouped.shape[:3], -1)
    else:
        rows = max(1, MAX_SCORES // (query.shape[1] * (end - first)))
        blocks = zip(grouped.split(rows, 2), seen.split(rows), strict=True)
        out = torch.cat(
            [
                attend_block(block, key, value, mask, scale, softcap, sinks).to(query.dtype)
                for block, mask in blocks
            ],
            2,
        )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Explicit attention of [Hkv, G, T, D] over [Hkv, n, D] where `seen` [T, n]; float32."""
    scores = _cap((query.float() @ key.float().transpose(-1, -2)[:, None]) * scale, softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sinks = sinks.repeat_interleave(seen.shape[0])  # one "head" per (head, row)
    weights = _softmax(scores.flatten(1, 2)[None], sinks)[0].view_as(scores)
    return weights @ value.float()[:, None]


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
    entries of pages that a sequence does not have are meaningless.
    """
    num_kv_heads = low.shape[1]
    head = torch.arange(num_kv_heads, device=low.device)[None, :, None]
    where = page_table.long()[:, None], head
    grouped = _grouped(query.float(), num_kv_heads)
    # A positive q_d is bounded by high_d, a negative one by low_d.
    bound = grouped.clamp(min=0) @ high[where].float().transpose(-1, -2)
    bound += grouped.clamp(max=0) @ low[where].float().transpose(-1, -2)
    return bound.amax(2)


def top_indices(
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
    """The `first` tokens and the newest k - first of each sequence; all of it if it has k or less.

    lengths int32 [B]. Returns token positions shared by all heads, [B, 1, k].
    """
    entry = torch.arange(k, device=lengths.device)[None]
    length = lengths.long()[:, None]
    skipped = (length - k).clamp(min=0) * (entry >= first)
    indices = (entry + skipped).masked_fill(entry >= length, -1)
    return Selection(indices.int()[:, None], lengths.clamp(max=k).int()[:, None], 1)


def members(listed: Tensor, count: int) -> Tensor:
    """Which of `count` entries are in lists [..., n]; -1 is none. Bool [..., count]."""
    found = listed.new_zeros(*listed.shape[:-1], count + 1, dtype=torch.bool)
    found.scatter_(-1, listed.long().where(listed >= 0, count), True)
    there: Tensor = found[..., :count]
    return there


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + bias; x [..., I], weight [O, I], bias [O]. Made for a few tokens, right for any."""
    return F.linear(x, weight, bias)

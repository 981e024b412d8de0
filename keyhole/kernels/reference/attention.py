"""Attention of a prompt's tokens and of decode steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels.reference.pages import (
    PageReads,
    gather_tokens,
    gathered,
    members,
    reads_of,
    window_pages,
)
from keyhole.kernels.reference.quantised import dequantised, row_dim
from keyhole.kernels.selection import PagedQuery, ScoreRequest, Selection


def in_groups(query: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, D] as [B, Hkv, G, D]."""
    return query.reshape(query.shape[0], num_kv_heads, -1, query.shape[-1])


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Soft-capped scores, c tanh(scores / c); None: the scores unchanged."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of [..., Hkv, G, n], with a sink logit per query head."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().view(scores.shape[1], scores.shape[2], 1)
    column = column.expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def attend(
    paged: PagedQuery,
    *,
    scale: float,
    selection: Selection | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest token: softmax(scale q K^T) V over the selection.

    selection None: all tokens. window w: the last w tokens only. softcap c: scores become
    c tanh(score / c). sinks [Hq]: one more logit per head that takes weight and has no value.
    Returns [B, Hq, Dv] in query's dtype.
    """
    query, key_pages, value_pages, page_table, lengths = paged
    if selection is None and window is not None:
        selection = window_pages(lengths, window, key_pages.shape[2], page_table.shape[1])
    reads = reads_of(key_pages, page_table, lengths, selection, window)
    weights = _weights(query, key_pages, reads, scale, softcap, sinks)
    return _mix(weights, value_pages, reads).to(query.dtype)


def attend_weights(
    paged: PagedQuery,
    selection: Selection | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`attend`, and its weights, float32 [B, Hkv, G, n] over the n tokens of the selection."""
    query, key_pages, value_pages, page_table, lengths = paged
    reads = reads_of(key_pages, page_table, lengths, selection, None)
    weights = _weights(query, key_pages, reads, scale, softcap, sinks)
    return _mix(weights, value_pages, reads).to(query.dtype), weights


def attend_and_score(
    paged: PagedQuery,
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
    out, weights = attend_weights(paged, None, scale, softcap, sinks)
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
) -> Tensor:
    """Attention weights of each query head, the largest of each group: float32 [B, Hkv, N].

    query [B, Hq, D], key_pages [P, Hkv, page_size, D], N = M * page_size. Entries past the sequence
    are 0. A retrieval head selects tokens by these weights (SpeContext, section 4.2).
    """
    return weights_over(query, key_pages, page_table, lengths, None, scale).amax(2)


def weights_over(
    query: Tensor,
    key_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    selection: Selection | None,
    scale: float,
) -> Tensor:
    """Attention weights over a selection (None: all), float32 [B, Hkv, G, n] for n tokens."""
    reads = reads_of(key_pages, page_table, lengths, selection, None)
    return _weights(query, key_pages, reads, scale, None, None)


def _weights(
    query: Tensor,
    key_pages: Tensor,
    reads: PageReads,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention weights, float32 [B, Hkv, G, n]."""
    grouped = in_groups(query.float(), key_pages.shape[1])
    scores = grouped.new_empty(*grouped.shape[:3], reads.valid.shape[-1])
    for key, tokens in reads.blocks(key_pages):
        scores[..., tokens] = grouped @ key.transpose(-1, -2)
    scores = capped(scores.mul_(scale), softcap)
    scores.masked_fill_(~reads.valid[:, :, None], float("-inf"))
    return softmax(scores, sinks)


def _mix(weights: Tensor, value_pages: Tensor, reads: PageReads) -> Tensor:
    """Values under weights [B, Hkv, G, n], float32 [B, Hq, Dv]."""
    out = weights.new_zeros(*weights.shape[:3], row_dim(value_pages))
    for value, tokens in reads.blocks(value_pages):
        # The gathered values are a copy. Where no token was written they may be NaN.
        value.masked_fill_(~reads.valid[..., tokens, None], 0.0)
        out += weights[..., tokens] @ value
    return out.flatten(1, 2)


#: The explicit path holds at most this many scores at once (256 MiB in float32).
MAX_SCORES = 1 << 26


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
        dequantised(gathered(x, (pages,), query.device))
        .to(query.dtype)
        .transpose(0, 1)
        .flatten(1, 2)[:, : end - first]
        for x in (key_pages, value_pages)
    )
    grouped = in_groups(query, num_kv_heads).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
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
        out = _in_blocks(grouped, key, value, seen, scale, softcap, sinks)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def sparse_prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    positions: Tensor,
    tokens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of tokens at any positions over chosen tokens not after them, [T, Hq, Dv].

    query [T, Hq, D]; pages int64 [M], the sequence's pages in order; positions int64 [T]; tokens
    int64 [n], ascending, all of them written, `positions` among them. The rest as in `prefill`.
    """
    if window is not None:
        tokens = tokens[tokens > positions.min() - window]
    key, value = (
        gather_tokens(x, pages, tokens).to(query.dtype).transpose(0, 1)
        for x in (key_pages, value_pages)
    )
    seen = tokens <= positions[:, None]
    if window is not None:
        seen &= tokens > positions[:, None] - window
    grouped = query.unflatten(1, (key.shape[0], -1)).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
    if softcap is None and sinks is None:
        mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
        # Without a batch dimension torch does not use its fused kernels for float32 products.
        parts = [
            F.scaled_dot_product_attention(
                part[None], key[None], value[None], attn_mask=mask, scale=scale
            )[0]
            for part in grouped.unbind(1)
        ]
        out = torch.stack(parts, 1)
    else:
        out = _in_blocks(grouped, key, value, seen, scale, softcap, sinks)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def block_sparse_prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    start: int,
    *,
    blocks: Selection,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one sequence's tokens start .. start + T - 1 over blocks of its pages.

    query [T, Hq, D]; pages int64 [M], softcap and sinks as in `prefill`. blocks: what each block of
    `unit` positions reads that has some of these tokens, R of them in order: indices [R, Hq, n],
    blocks of `unit` positions for each query head, its own block among them. A token does not read
    later ones. Returns [T, Hq, Dv] in query's dtype.
    """
    end, size = start + len(query), blocks.unit
    key, value = (
        dequantised(gathered(x, (pages[: -(-end // key_pages.shape[2])],), query.device))
        .to(query.dtype)
        .transpose(0, 1)
        .flatten(1, 2)[:, :end]
        for x in (key_pages, value_pages)
    )
    grouped = query.unflatten(1, (key.shape[0], -1)).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
    position = torch.arange(end, device=query.device)
    most = max(1, MAX_SCORES // (query.shape[1] * end))
    parts = []
    for row, read in enumerate(members(blocks.indices, -(-end // size))):
        of_head = read.repeat_interleave(size, 1)[:, :end].unflatten(0, grouped.shape[:2])
        block = start // size + row
        for begin in range(max(start, block * size), min(end, (block + 1) * size), most):
            own = position[begin : min(begin + most, end, (block + 1) * size)]
            seen = of_head[:, :, None] & (position <= own[:, None])
            part = grouped[:, :, own[0] - start : own[-1] + 1 - start]
            mixed = attend_block(part, key, value, seen, scale, softcap, sinks)
            parts.append(mixed.to(query.dtype))
    return torch.cat(parts, 2).permute(2, 0, 1, 3).flatten(1, 2)


def _in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`attend_block` in query's dtype, for so many rows at a time that MAX_SCORES holds."""
    rows = max(1, MAX_SCORES // (query.shape[0] * query.shape[1] * key.shape[1]))
    blocks = zip(query.split(rows, 2), seen.split(rows), strict=True)
    parts = [
        attend_block(block, key, value, mask, scale, softcap, sinks).to(query.dtype)
        for block, mask in blocks
    ]
    return torch.cat(parts, 2)


def attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Explicit attention of [Hkv, G, T, D] over [Hkv, n, D], in float32.

    seen: bool [T, n], or [Hkv, G, T, n] where it differs between heads.
    """
    scores = capped((query.float() @ key.float().transpose(-1, -2)[:, None]) * scale, softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sinks = sinks.repeat_interleave(seen.shape[-2])  # one "head" per (head, row)
    weights = softmax(scores.flatten(1, 2)[None], sinks)[0].view_as(scores)
    return weights @ value.float()[:, None]

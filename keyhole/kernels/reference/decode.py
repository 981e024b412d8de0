"""Attention of one query token per sequence over all or selected tokens, and its weights."""

from __future__ import annotations

from torch import Tensor

from keyhole.kernels.reference.pages import PageReads, reads_of, window_pages
from keyhole.kernels.reference.softmax import capped, in_groups, softmax
from keyhole.kernels.selection import ScoreRequest, Selection


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
    """Attention of each sequence's newest token: softmax(scale q K^T) V over the selection.

    query [B, Hq, D]; key_pages [P, Hkv, page_size, D]; value_pages [P, Hkv, page_size, Dv];
    page_table int32 [B, M]; lengths int32 [B], the newest token included. selection None: all.
    window w: the last w tokens only. softcap c: scores become c tanh(score / c). sinks [Hq]: one
    more logit per head that takes weight and has no value. Returns [B, Hq, Dv] in query's dtype.
    """
    if selection is None and window is not None:
        selection = window_pages(lengths, window, key_pages.shape[2], page_table.shape[1])
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
    reads = reads_of(key_pages, page_table, lengths, selection, window)
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
    are 0. A retrieval head selects tokens by these weights (SpeContext, section 4.2). selection:
    the softmax covers its tokens alone, and N is the length of its list.
    """
    reads = reads_of(key_pages, page_table, lengths, selection, None)
    return _weights(query, key_pages, reads, scale, None, None).amax(2)


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
    out = weights.new_zeros(*weights.shape[:3], value_pages.shape[-1])
    for value, tokens in reads.blocks(value_pages):
        # The gathered values are a copy. Where no token was written they may be NaN.
        value.masked_fill_(~reads.valid[..., tokens, None], 0.0)
        out += weights[..., tokens] @ value
    return out.flatten(1, 2)

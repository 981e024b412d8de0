"""The public operations; torch's dispatcher picks the backend.

The twin of the same name in `reference` documents signature, shapes and meaning. Importing this
registers them (`dispatch`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.kernels import dispatch, reference
from keyhole.kernels.reference import blocks, clusters, gathered_attention, low_rank, selections
from keyhole.kernels.selection import LowRank, ScoreRequest, Selection


def append(
    key_pages: Tensor,
    value_pages: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
) -> None:
    """Writes new tokens into their pages, in place."""
    torch.ops.keyhole.append(key_pages, value_pages, key, value, slots)


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
    """One query token per sequence over all, some pages or some tokens, [B, Hq, Dv]."""
    paged = (query, key_pages, value_pages, page_table, lengths)
    chosen = (None, None, 1)
    if selection is not None:
        chosen = (selection.indices, selection.counts, selection.unit)  # type: ignore[assignment]
    out: Tensor = torch.ops.keyhole.attend(*paged, *chosen, scale, window, softcap, sinks)
    return out


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
    """`attend` over everything, and for each request the reduced weights, float32 [B, H, n]."""
    paged = (query, key_pages, value_pages, page_table, lengths)
    reduces, units = [r.reduce for r in requests], [r.unit for r in requests]
    out, scores = torch.ops.keyhole.attend_and_score(*paged, reduces, units, scale, softcap, sinks)
    return out, tuple(scores)


def attend_low_rank(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    selection: Selection,
    low_rank: LowRank,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` over selected tokens, some of their keys reconstructed, [B, Hq, Dv]."""
    heads = key_pages.shape[1]
    paged = (query, key_pages, value_pages, page_table, lengths)
    chosen = (selection.indices.expand(-1, heads, -1), selection.counts.expand(-1, heads))
    low = low_rank
    rebuilt = (low.coefficients, low.basis, low.first, low.taken, low.chunk)
    turned = (low.frequencies, low.last)
    out: Tensor = torch.ops.keyhole.attend_low_rank(
        *paged, *chosen, *rebuilt, scale, softcap, sinks, *turned
    )
    return out


def head_scores(
    query: Tensor, key_pages: Tensor, page_table: Tensor, lengths: Tensor, *, scale: float
) -> Tensor:
    """Attention weights of each query head, the largest of each group: float32 [B, Hkv, N]."""
    scores: Tensor = torch.ops.keyhole.head_scores(query, key_pages, page_table, lengths, scale)
    return scores


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
    """Causal attention of one sequence's tokens start .. start + T - 1, [T, Hq, Dv]."""
    out: Tensor = torch.ops.keyhole.prefill(
        query, key_pages, value_pages, pages, start, scale, window, softcap, sinks
    )
    return out


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
    """Attention of tokens at any positions over chosen tokens not after them, [T, Hq, Dv]."""
    paged = (query, key_pages, value_pages, pages, positions, tokens)
    out: Tensor = torch.ops.keyhole.sparse_prefill(*paged, scale, window, softcap, sinks)
    return out


def page_bounds(
    key_pages: Tensor, low: Tensor, high: Tensor, pages: Tensor, filled: Tensor
) -> None:
    """Elementwise bounds of the keys of some pages, written in place."""
    torch.ops.keyhole.page_bounds(key_pages, low, high, pages, filled)


def bound_scores(query: Tensor, low: Tensor, high: Tensor, page_table: Tensor) -> Tensor:
    """Quest's bound of a query's score on every page, float32 [B, Hkv, M]."""
    scores: Tensor = torch.ops.keyhole.bound_scores(query, low, high, page_table)
    return scores


def top_k(
    scores: Tensor, valid: Tensor, k: int, unit: int, *, first: int = 0, last: int = 0
) -> Selection:
    """The k best entries of each row; equal scores go to the earlier entry."""
    indices, counts = torch.ops.keyhole.top_k(scores, valid, k, first, last)
    return Selection(indices, counts, unit)


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
    """The fewest selected entries that hold a share of the scores."""
    places = (least, first, last)
    left, counts = torch.ops.keyhole.trim(chosen.indices, scores, valid, share, *places)
    return Selection(left, counts, chosen.unit)


def shift_rope(x: Tensor, by: Tensor, frequencies: Tensor, last: bool) -> Tensor:
    """Vectors rotated at any positions, shifted by `by` positions; a new tensor."""
    turned: Tensor = torch.ops.keyhole.shift_rope(x, by, frequencies, last)
    return turned


def load_missing(
    entries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    key_pages: Tensor,
    value_pages: Tensor | None,
    page_table: Tensor,
    lengths: Tensor,
    rows: Tensor,
    *,
    selection: Selection,
) -> tuple[Selection, Tensor]:
    """Copies selected entries that are missing into the buffers of sequences."""
    chosen = (selection.indices, selection.unit)
    assert selection.indices.shape[2] < entries.shape[2], "the last slot is the newest entry's"
    used, counts, moved = torch.ops.keyhole.load_missing(
        entries, keys, values, key_pages, value_pages, page_table, lengths, rows, *chosen
    )
    return Selection(used, counts, selection.unit), moved


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [B, Hq, T, D] and keys [B, Hkv, T, D] with RoPE applied; new tensors."""
    turned: tuple[Tensor, Tensor] = torch.ops.keyhole.apply_rope(query, key, cos, sin)
    return turned


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + bias for a few tokens, [..., O]."""
    out: Tensor = torch.ops.keyhole.linear(x, weight, bias)
    return out


backend, use_triton = dispatch.backend, dispatch.use_triton
recent_indices = reference.recent_indices
attend_and_score_chosen = gathered_attention.attend_and_score_chosen
head_scores_chosen, gather_tokens = (
    gathered_attention.head_scores_chosen,
    gathered_attention.gather_tokens,
)
form_clusters, cluster_scores = clusters.form_clusters, clusters.cluster_scores
add_received, represent_blocks = blocks.add_received, blocks.represent_blocks
block_scores, block_pages = blocks.block_scores, blocks.block_pages
between_ends = blocks.between_ends
keep, kept, with_newer = selections.keep, selections.kept, selections.with_newer
chunk_landmarks, chunk_scores = low_rank.chunk_landmarks, low_rank.chunk_scores
outlier_chunks = low_rank.outlier_chunks
attend_per_query_head = clusters.attend_per_query_head
bound_scores_per_query_head = clusters.bound_scores_per_query_head
cluster_scores_per_query_head = clusters.cluster_scores_per_query_head
prompt_scores = selections.prompt_scores
decompose = low_rank.decompose
summary_scores, spread_scores = selections.summary_scores, selections.spread_scores
renew_stamps, drop_oldest = selections.renew_stamps, selections.drop_oldest

"""Selections of which every query head has its own list, though heads of a group share keys.

The kernels take a list per KV head. Here each sequence becomes G rows of a batch, one for each
place in a group: row g has the g-th query head of every group, so that a KV head has one query head
and one list. Keys and values stay where they are; only queries, lists and rows of the page table
are laid out anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.kernels.composite import clusters
from keyhole.kernels.selection import Selection


def attend_per_query_head(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    selection: Selection,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` with a list per query head, [B, Hq, Dv].

    selection: indices [B, Hq, n], counts [B, Hq]; otherwise as in `attend`.
    """
    heads, group = key_pages.shape[1], query.shape[1] // key_pages.shape[1]
    lists = selection.indices, selection.counts

    def attend(
        query: Tensor, rows: tuple[Tensor, ...], lists: tuple[Tensor, ...], sinks: Tensor | None
    ) -> Tensor:
        chosen = (*lists, selection.unit, scale, None, softcap, sinks)
        out: Tensor = torch.ops.keyhole.attend(query, key_pages, value_pages, *rows, *chosen)
        return out

    if sinks is None or group == 1:
        rows = tuple(x.repeat_interleave(group, 0) for x in (page_table, lengths))
        chosen = tuple(_by_place(x, heads) for x in lists)
        return _by_head(attend(_by_place(query, heads), rows, chosen, sinks), group)
    # A kernel takes a sink per head, the same for all rows; here heads differ from row to row.
    parts = []
    for place in range(group):
        chosen = tuple(x[:, place::group].contiguous() for x in lists)
        own = sinks[place::group].contiguous()
        parts.append(attend(query[:, place::group], (page_table, lengths), chosen, own))
    return torch.stack(parts, 2).flatten(1, 2)


def bound_scores_per_query_head(
    query: Tensor, low: Tensor, high: Tensor, page_table: Tensor
) -> Tensor:
    """`bound_scores` of each query head, float32 [B, Hq, M]."""
    heads, group = low.shape[1], query.shape[1] // low.shape[1]
    table = page_table.repeat_interleave(group, 0)
    scores = torch.ops.keyhole.bound_scores(_by_place(query, heads), low, high, table)
    return _by_head(scores, group)


def cluster_scores_per_query_head(
    query: Tensor,
    centroids: Tensor,
    numbers: Tensor,
    page_table: Tensor,
    first: int,
    ends: Tensor,
    count: int,
) -> Tensor:
    """`cluster_scores` of each query head, float32 [B, Hq, N]."""
    heads, group = centroids.shape[2], query.shape[1] // centroids.shape[2]
    rows = tuple(x.repeat_interleave(group, 0) for x in (page_table, ends))
    stored = (centroids, numbers, rows[0], first, rows[1], count)
    return _by_head(clusters.cluster_scores(_by_place(query, heads), *stored), group)


def _by_place(rows: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, ...] as [B * G, Hkv, ...]: a row for each place in a group."""
    size = len(rows), num_kv_heads, -1, *rows.shape[2:]
    return rows.reshape(size).transpose(1, 2).flatten(0, 1)


def _by_head(rows: Tensor, group: int) -> Tensor:
    """[B * G, Hkv, ...] as [B, Hq, ...] again."""
    return rows.view(-1, group, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)

"""Clusters of keys (ClusterKV), and selections with a list per query head.

Plain PyTorch on every device, except for the scores. Sums over the keys of a cluster are matrix
products, which makes the clusters deterministic on a GPU too, where scattered additions are not.

The kernels take a list per KV head; a selection may have one per query head. Here each sequence
becomes G rows of a batch, one for each query head of a group: row g has the g-th query head of
every group, so that a KV head has one query head and one list. Keys and values are not copied; only
queries, lists and rows of the page table are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels import reference
from keyhole.kernels.operations import attend, bound_scores, spread_scores, summary_scores
from keyhole.kernels.selection import PagedQuery, Selection

#: Rounds of k-means. The authors' limit is 20; recall hardly changes after a few.
ITERATIONS = 10

# Similarities computed at once (64 MiB in float32).
_NUMBERS = 1 << 24

# Cluster numbers are stored with the keys, as integers of the same width.
_INTEGERS = {2: torch.int16, 4: torch.int32}


def cluster_keys(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Keys [n, Hkv, D] in `count` clusters per head, 1 <= count <= n, by cosine similarity.

    k-means from evenly spaced keys (key i n // count is the first centroid i): ITERATIONS times
    every key joins the centroid of largest cosine (ties go to the earlier one), and every centroid
    becomes the mean of its keys; a centroid without keys does not change. Returns the means,
    float32 [Hkv, count, D], and int64 [Hkv, n], the cluster of each key.
    """
    keys = keys.transpose(0, 1)
    heads, n, _ = keys.shape
    place = torch.arange(count, device=keys.device)
    means = keys[:, place * n // count].float()
    clusters = place.new_zeros(heads, n)
    rows = max(1, _NUMBERS // (heads * count))
    for _ in range(ITERATIONS if count > 1 else 1):  # one cluster has all keys from the start
        # The norm of a key scales its products with all centroids equally, so it is not divided
        # out.
        directions = F.normalize(means, dim=-1).transpose(1, 2)
        sums, sizes = torch.zeros_like(means), means.new_zeros(heads, count, 1)
        for start in range(0, n, rows):
            part = keys[:, start : start + rows].float()
            similarity = part @ directions
            nearest = similarity.argmax(-1, keepdim=True)
            member = similarity.zero_().scatter_(-1, nearest, 1.0).transpose(1, 2)
            sums += member @ part
            sizes += member.sum(-1, keepdim=True)
            clusters[:, start : start + rows] = nearest.squeeze(-1)
        means = torch.where(sizes > 0, sums / sizes.clamp(min=1), means)
    return means, clusters


def form_clusters(
    key_pages: Tensor,
    centroids: Tensor,
    clusters: Tensor,
    pages: Tensor,
    tokens: tuple[int, int],
    numbers: tuple[int, int],
) -> None:
    """Assigns tokens (first, end) of a sequence to its clusters (first, end), in place.

    key_pages [P, Hkv, page_size, D]; centroids [P, m, Hkv, D]: cluster i is stored at
    i % m of page i // m of the sequence; clusters [P, Hkv, page_size], each token's cluster, as
    integers in the bits of floats; pages int64 [M], the sequence's pages in order. Tokens of
    clusters beyond the largest such integer have that number.
    """
    size, slots = clusters.shape[2], centroids.shape[1]
    token = torch.arange(*tokens, device=pages.device)
    number = torch.arange(*numbers, device=pages.device)
    means, found = cluster_keys(reference.gather_tokens(key_pages, pages, token), len(number))
    centroids[pages[number // slots], number % slots] = means.transpose(0, 1).to(centroids.dtype)
    bits = _as_integers(clusters)
    own = (found.T + numbers[0]).clamp(max=torch.iinfo(bits.dtype).max)
    bits[pages[token // size], :, token % size] = own.to(bits.dtype)


def cluster_scores(
    query: Tensor,
    centroids: Tensor,
    clusters: Tensor,
    page_table: Tensor,
    first: int,
    ends: Tensor,
    count: int,
) -> Tensor:
    """The score of each token's cluster, q . centroid, float32 [B, Hkv, N]; infinite without one.

    The largest over each group of query heads. query [B, Hq, D]; centroids and clusters as in
    `form_clusters`; page_table int32 [B, M]; ends int32 [B]: tokens before `first` and from `ends`
    on are in no cluster; count: an upper bound of the clusters of any sequence. N = M * page_size.
    """
    _, slots, heads, _ = centroids.shape
    used = page_table[:, : -(-count // slots)]
    everything = torch.full_like(ends, used.shape[1] * slots)
    products = summary_scores(query, centroids, used, everything)
    scores = products.unflatten(1, (heads, -1)).amax(2)
    return spread_scores(scores, _as_integers(clusters), page_table, first, ends)


def _as_integers(numbers: Tensor) -> Tensor:
    return numbers.view(_INTEGERS[numbers.itemsize])


def attend_per_query_head(
    paged: PagedQuery,
    *,
    selection: Selection,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` with a list per query head, [B, Hq, Dv].

    selection: indices [B, Hq, n], counts [B, Hq]; otherwise as in `attend`.
    """
    query, key_pages, value_pages, page_table, lengths = paged
    heads, group = key_pages.shape[1], query.shape[1] // key_pages.shape[1]

    def attend_to(
        query: Tensor, rows: tuple[Tensor, Tensor], own: Selection, sinks: Tensor | None
    ) -> Tensor:
        paged = PagedQuery(query, key_pages, value_pages, *rows)
        return attend(paged, selection=own, scale=scale, softcap=softcap, sinks=sinks)

    if sinks is None or group == 1:
        rows = page_table.repeat_interleave(group, 0), lengths.repeat_interleave(group, 0)
        indices, counts = (_by_place(x, heads) for x in (selection.indices, selection.counts))
        own = Selection(indices, counts, selection.unit)
        return _by_head(attend_to(_by_place(query, heads), rows, own, sinks), group)
    # A kernel takes one sink per head for all rows; here the heads differ between rows.
    parts = []
    for place in range(group):
        mine = slice(place, None, group)
        indices, counts = (x[:, mine].contiguous() for x in (selection.indices, selection.counts))
        own, rows = Selection(indices, counts, selection.unit), (page_table, lengths)
        parts.append(attend_to(query[:, mine], rows, own, sinks[mine].contiguous()))
    return torch.stack(parts, 2).flatten(1, 2)


def bound_scores_per_query_head(
    query: Tensor, low: Tensor, high: Tensor, page_table: Tensor
) -> Tensor:
    """`bound_scores` of each query head, float32 [B, Hq, M]."""
    heads, group = low.shape[1], query.shape[1] // low.shape[1]
    table = page_table.repeat_interleave(group, 0)
    scores = bound_scores(_by_place(query, heads), low, high, table)
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
    return _by_head(cluster_scores(_by_place(query, heads), *stored), group)


def _by_place(rows: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, ...] as [B * G, Hkv, ...]: a row for each query head of a group."""
    size = len(rows), num_kv_heads, -1, *rows.shape[2:]
    return rows.reshape(size).transpose(1, 2).flatten(0, 1)


def _by_head(rows: Tensor, group: int) -> Tensor:
    """[B * G, Hkv, ...] as [B, Hq, ...] again."""
    return rows.view(-1, group, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)

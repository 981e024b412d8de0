"""What the last queries of a sequence say about its tokens, for policies that evict (SnapKV, R-KV).

The last W queries are kept as they come, the query at position p in row p mod W of the sequence's
state, with the scale of attention in them. Plain PyTorch on every device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels import reference
from keyhole.kernels.selection import Selection


def keep_queries(stored: Tensor, rows: Tensor, query: Tensor, positions: Tensor) -> None:
    """Stores queries in place, each in the row of its position.

    stored [slots, W, Hq, D]; rows int64 [n], slots; query [n, Hq, D], scaled; positions int64 [n],
    of which no two of a slot are W or more apart.
    """
    stored[rows, positions % stored.shape[1]] = query.to(stored.dtype)


def last_queries(stored: Tensor, slot: Tensor, length: int) -> Tensor:
    """The queries of the last tokens of a sequence, oldest first, [min(W, length), Hq, D]."""
    window = stored.shape[1]
    positions = torch.arange(max(0, length - window), length, device=stored.device)
    return stored[slot, positions % window]


def observed_attention(
    query: Tensor, key_pages: Tensor, pages: Tensor, length: int, *, kernel_size: int, pooling: str
) -> Tensor:
    """SnapKV: the attention that prompt tokens receive from the last ones, float32 [Hkv, length].

    query [W, Hq, D], scaled, of the last W tokens; key_pages [P, Hkv, page_size, D]; pages int64
    [M], the sequence's. The weights are summed over the W queries, averaged over the query heads of
    a KV head, and pooled over `kernel_size` neighbouring tokens before the window, by their mean
    ("avg", where places beyond the ends count as 0) or their largest ("max"). The last W tokens
    score 0.
    """
    keys = _keys(key_pages, pages, query.device)[:, :length]
    window = len(query)
    logits = _in_groups(query, len(keys)) @ keys[:, None].mT  # [Hkv, G, W, length]
    place = torch.arange(length, device=query.device)
    later = place > (length - window + torch.arange(window, device=query.device))[:, None]
    weights = logits.masked_fill(later, float("-inf")).softmax(-1)
    received = weights[..., : length - window].sum(2).mean(1)
    return F.pad(_pooled(received, kernel_size, pooling), (0, window))


def most_observed(scores: Tensor, window: int, count: int) -> Tensor:
    """The last `window` tokens, newest first, then those of highest score, int32 [Hkv, count].

    scores: float32 [Hkv, N]; of equal scores the earlier token comes first. Padded with -1.
    """
    last = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)[:window]
    earlier = scores[:, : scores.shape[1] - len(last)]
    best = earlier.sort(dim=-1, descending=True, stable=True).indices
    ranked = torch.cat([last.expand(len(scores), -1), best], 1)[:, :count]
    return F.pad(ranked, (0, count - ranked.shape[1]), value=-1).to(torch.int32)


def redundancy_scores(
    query: Tensor,
    key_pages: Tensor,
    pages: Tensor,
    *,
    kernel_size: int,
    mix_lambda: float,
    threshold: float,
) -> Tensor:
    """R-KV: importance minus redundancy of the tokens in some full pages, float32 [Hkv, N - W].

    query [W, Hq, D], scaled, of the last W of these N tokens; key_pages [P, Hkv, page_size, D];
    pages int64 [M]. The last W tokens are always kept and have no score.
    """
    keys, window = _keys(key_pages, pages, query.device), len(query)
    logits = (_in_groups(query, len(keys)) @ keys[:, None].mT).amax(1)  # [Hkv, W, N]
    weights = logits[..., : keys.shape[1] - window].softmax(-1).mean(1)
    importance = _pooled(weights, kernel_size, "max")
    return mix_lambda * importance - (1 - mix_lambda) * _redundancy(keys, threshold)[:, :-window]


def read_kept(
    ranked: Tensor, prompts: Tensor, lengths: Tensor, most: int, width: int, total: int | None
) -> Selection:
    """The kept tokens of prompts and the newest `most` generated ones; [B, H, width].

    ranked int32 [B, H, n]: the kept tokens, the most important first, padded with -1; prompts,
    lengths int32 [B]. total: the most tokens of a selection, of which generated ones take the
    places of the least important kept ones; None: all are read.
    """
    generated = (lengths - prompts).clamp(max=most)
    if total is not None:
        room = (total - generated).clamp(min=0)
        rank = torch.arange(ranked.shape[2], device=ranked.device)
        ranked = ranked.masked_fill(rank >= room[:, None, None], -1)
    since = torch.arange(most, device=ranked.device, dtype=ranked.dtype)
    newer = (lengths - generated)[:, None] + since
    newer = newer.masked_fill(since >= generated[:, None], -1).to(ranked.dtype)
    both = torch.cat([ranked, newer[:, None].expand(-1, ranked.shape[1], -1)], 2)
    # Padding sorts behind all tokens.
    end = torch.iinfo(both.dtype).max
    both = both.masked_fill(both < 0, end).sort(-1).values[..., :width]
    counts = (both < end).sum(-1).to(torch.int32)
    return Selection(both.masked_fill(both == end, -1).contiguous(), counts, 1)


def _keys(key_pages: Tensor, pages: Tensor, device: torch.device) -> Tensor:
    """The keys in some pages, one after another, float32 [Hkv, M * page_size, D]; pages [M]."""
    found = reference.gathered(key_pages, (pages,), device)  # [M, Hkv, page_size, D]
    return reference.dequantised(found).float().transpose(0, 1).flatten(1, 2)


def _in_groups(query: Tensor, num_kv_heads: int) -> Tensor:
    """[W, Hq, D] as float32 [Hkv, G, W, D]."""
    grouped: Tensor = query.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    return grouped


def _pooled(scores: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """[Hkv, n], each the mean or the largest of `kernel_size` neighbours around it."""
    if not scores.shape[1]:
        return scores
    pool = F.avg_pool1d if pooling == "avg" else F.max_pool1d
    pooled: Tensor = pool(scores, kernel_size, stride=1, padding=kernel_size // 2)
    return pooled


def _redundancy(keys: Tensor, threshold: float) -> Tensor:
    """The softmax over tokens of their mean cosine with the others, [Hkv, N].

    Of the tokens similar to one (cosine above the threshold) the newest is not counted as
    redundant to it, so that one of them is kept.
    """
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    cosine = unit @ unit.mT  # [Hkv, N, N]
    cosine.diagonal(dim1=-2, dim2=-1).zero_()
    place = torch.arange(keys.shape[1], device=keys.device)
    newest = place.where(cosine > threshold, 0).amax(-1, keepdim=True)
    cosine.scatter_(-1, newest, 0.0)
    shares: Tensor = cosine.mean(-2).softmax(-1)
    return shares

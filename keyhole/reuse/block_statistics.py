"""Statistics of a document's blocks, collected while the document is encoded.

SamKV, appendix A.1. An important token receives attention from many later tokens, near and far:
that attention falls slowly with distance, y ~ distance^-alpha with a small alpha. A block is
represented by the token that receives most.

No n x n matrix of weights is ever materialized. Queries arrive in chunks, in order; weights exist
for a few rows at a time and are summed immediately, per token and bin of distance. Cost per layer:
queries times keys and their softmax once more; memory: about 2 log2(n) float32 numbers per token,
and the current rows.

What the paper leaves open:
- Distance 0, a token's attention to itself, does not count: attention "from subsequent tokens".
- Only pairs that the layer lets see each other count: with a sliding window, distances below it.
- A bin stands at the mean of its distances with the mean of its attention. Attention too small for
  a float32 counts as the smallest normal one: the least importance.
- A token that no later token sees has received 0. It represents a block only if all in the block
  are like it (the last token, alone in its block).
- Below two bins, or where nothing is received, there is no slope: alpha is +inf, the least
  important, and never an outlier. Only the last token of a document and the one before it have so
  few bins; their slopes are noise, but SamKV keeps their blocks whatever their importance.
- Ties go to the earlier token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

import torch
from torch import Tensor

# Weights held at once. On a CPU they should stay near its caches, a GPU wants large steps.
_MOST_WEIGHTS = {"cpu": 1 << 20}
_MOST_WEIGHTS_ELSEWHERE = 1 << 26


class BlockMeans:
    """Mean keys or queries of each block, from rows in chunks that may end anywhere in a block.

    length: rows in all. block_size: rows of a block; the last may be shorter.
    """

    def __init__(self, length: int, block_size: int, device: torch.device | str = "cpu") -> None:
        owners = torch.arange(length, device=device) // block_size
        self._owners, self._sizes = owners, owners.bincount()
        self._sums: Tensor | None = None
        self._seen = 0

    def add(self, rows: Tensor) -> None:
        """Counts the next rows [t, H, D], in order."""
        if self._sums is None:
            shape = len(self._sizes), *rows.shape[1:]
            self._sums = rows.new_zeros(shape, dtype=torch.float32)
        end = self._seen + len(rows)
        self._sums.index_add_(0, self._owners[self._seen : end], rows.float())
        self._seen = end

    def finish(self) -> Tensor:
        """The means, float32 [N, H, D], once every row has been added."""
        assert self._sums is not None, "rows are missing"
        assert self._seen == len(self._owners), "rows are missing"
        return self._sums / self._sizes[:, None, None]


def block_means(rows: Tensor, block_size: int) -> Tensor:
    """The mean of each block of rows [n, H, D], float32 [N, H, D]; the last block may be short."""
    means = BlockMeans(len(rows), block_size, rows.device)
    means.add(rows)
    return means.finish()


@dataclass(frozen=True, eq=False)
class BlockStatistics:
    """For each block of one layer: its representative, and the attention that this token receives.

    representatives: int64 [N], tokens from 0 in the document. alpha: float32 [N], how fast what it
    receives falls with distance; less is more important. received: float32 [N], the mean over the
    later tokens that can see it.
    """

    representatives: Tensor
    alpha: Tensor
    received: Tensor


class ReceivedAttention:
    """Attention that each token of a document receives in one layer, from queries in chunks.

    length: tokens of the document. block_size: tokens of a block; the last may be shorter.
    """

    def __init__(self, length: int, block_size: int, device: torch.device | str = "cpu") -> None:
        edges = _edges(length)
        self._length, self._block_size = length, block_size
        self._bins = list(pairwise(edges))
        self._sums = torch.zeros(len(self._bins), length, device=device)
        self._window: int | None = None
        self._seen = 0

    def add(
        self,
        query: Tensor,
        keys: Tensor,
        start: int,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        window: int | None = None,
    ) -> None:
        """Counts what tokens `start` .. `start + t - 1` attend to.

        query [t, Hq, D]; keys [start + t, Hkv, D], of all tokens so far, rotated as the queries
        are. scale, softcap, sinks [Hq] and window as in `kernels.attend`.
        """
        end = start + len(query)
        assert start == self._seen, "chunks come in order"
        assert end == len(keys) <= self._length, "keys of all tokens so far"
        self._seen, self._window = end, window
        most = _MOST_WEIGHTS.get(query.device.type, _MOST_WEIGHTS_ELSEWHERE)
        group = query.shape[1] // keys.shape[1]
        first = start
        while first < end:
            low = 0 if window is None else max(0, first - window + 1)
            last = min(end, first + max(1, most // (group * (end - low))))
            token = torch.arange(low, last, device=query.device, dtype=torch.int32)
            distance = token[first - low :, None] - token
            unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
            rows = query[first - start : last - start]
            weights = _mean_weights(rows, keys[low:last], unseen, scale, softcap, sinks)
            self._collect(weights, distance, first, low)
            first = last

    def finish(self) -> BlockStatistics:
        """The statistics of all blocks, once every token has been added."""
        assert self._seen == self._length, "every token is added before the end"
        device = self._sums.device
        # The farthest token that sees each one.
        farthest = self._length - 1 - torch.arange(self._length, device=device)
        if self._window is not None:
            farthest = farthest.clamp(max=self._window - 1)
        received = self._sums.sum(0) / farthest.clamp(min=1)
        number = -(-self._length // self._block_size)
        padded = received.new_full((number * self._block_size,), -1.0)
        padded[: self._length] = received
        place = padded.view(number, self._block_size).argmax(1)  # the first of equals
        token = place + torch.arange(number, device=device) * self._block_size
        alpha = self._decay(token, farthest[token])
        return BlockStatistics(token, alpha, received[token])

    def _collect(self, weights: Tensor, distance: Tensor, first: int, low: int) -> None:
        """Adds weights [t, n] of rows `first` .. on tokens `low` .. by their distance [t, n]."""
        last = first + len(weights)
        for sums, (near, far) in zip(self._sums, self._bins, strict=True):
            # Tokens that any row sees at such a distance, and those that all rows do.
            left, right = max(low, first - far + 1), last - near
            inner, outer = max(low, last - far), first - near + 1
            if inner < outer:
                sums[inner:outer] += weights[:, inner - low : outer - low].sum(0)
            else:
                inner, outer = right, right
            for start, end in ((left, inner), (outer, right)):
                if start < end:
                    part = slice(start - low, end - low)
                    inside = (distance[:, part] >= near) & (distance[:, part] < far)
                    sums[start:end] += torch.where(inside, weights[:, part], 0.0).sum(0)

    def _decay(self, token: Tensor, farthest: Tensor) -> Tensor:
        """How fast what tokens [N] receive decays: log y = c - alpha log distance, least squares.

        farthest: int64 [N], the largest distance from which each is seen. Returns float32 [N].
        """
        if not self._bins:
            return torch.full_like(token, torch.inf, dtype=torch.float32)
        near, far = torch.tensor(self._bins, device=token.device).T[..., None]
        last = torch.minimum(far - 1, farthest)
        count = last - near + 1
        there = count > 0
        tiny = torch.finfo(torch.float32).tiny
        sums = self._sums[:, token]
        y = (sums.double() / count.clamp(min=1)).clamp(min=tiny).log()
        x = ((near + last).double() / 2).clamp(min=1).log()
        number = there.sum(0).clamp(min=1)
        x = torch.where(there, x - torch.where(there, x, 0).sum(0) / number, 0)
        slope = (x * y).sum(0) / (x * x).sum(0)
        known = (there.sum(0) > 1) & (sums > 0).any(0)
        return torch.where(known, -slope, torch.inf).float()


def _edges(length: int) -> list[int]:
    """First distances of the bins [2^(b/2), 2^((b+1)/2)), and the end; empty bins left out."""
    if length < 2:
        return []
    # d >= 2^(b/2) where d^2 >= 2^b: whole numbers, so that no rounding moves an edge.
    firsts = (isqrt((1 << b) - 1) + 1 for b in range(2 * length.bit_length() + 1))
    return [*sorted({d for d in firsts if d < length}), length]


def _mean_weights(
    query: Tensor,
    keys: Tensor,
    unseen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention weights, mean over heads, float32 [t, n].

    query [t, Hq, D]; keys [n, Hkv, D]; unseen bool [t, n].
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    group = heads // kv_heads
    total = torch.zeros(unseen.shape, device=query.device)
    for head in range(kv_heads):
        own = slice(head * group, (head + 1) * group)
        scores = (query[:, own].transpose(0, 1).float() * scale) @ keys[:, head].float().T
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        scores.masked_fill_(unseen, -torch.inf)
        peak = scores.amax(-1, keepdim=True)
        sink = None if sinks is None else sinks[own].float()[:, None, None]
        if sink is not None:
            peak = torch.maximum(peak, sink)
        scores.sub_(peak).exp_()
        whole = scores.sum(-1, keepdim=True)
        if sink is not None:
            whole += (sink - peak).exp()
        total += scores.div_(whole).sum(0)
    return total.div_(heads)

"""Statistics of a document's blocks, collected while the document is encoded.

SamKV, appendix A.1. An important token receives attention from many later tokens, near and far:
that attention falls slowly with distance, y ~ distance^-alpha with a small alpha. A block is
represented by the token that receives most.

Blocks are compared with each other, so all must be measured alike. What a token receives depends on
where it is: late tokens are seen from few distances, and early ones by queries that share their
attention among few tokens. Measured over all available distances, alpha would fall along any
document. Therefore everything is measured over distances 1 to R, the tokens of a block, and in each
head a query's attention to the R tokens before it is divided by its sum. Where the blocks of a text
are exchangeable, the statistics have the same distribution in every block.

Queries arrive in chunks, in order; weights exist for a few rows at a time and are summed
immediately. Cost per layer: queries times the keys of two blocks, and their softmax; memory: about
2 log2(R) float32 numbers per token, and the current rows.

What the paper leaves open:
- The distances: 1 to R. A token that is not seen from all of them, or by queries that have fewer
  than R tokens before them, cannot be compared: alpha and received are +inf, the least important,
  and never an outlier. These are tokens of the first and of the last block, or, if that is short,
  of the last two.
- A token's mean is over the distances that it has; the token with the highest represents its block.
  The last token of a document has received 0.
- Distance 0, a token's attention to itself, does not count: attention "from subsequent tokens".
- Only pairs that the layer lets see each other count: with a sliding window of W, R is at most
  W - 1. A sink takes the same part of all weights of a query, and drops out of its shares.
- A bin is represented by the mean of its distances and the mean of its attention. Attention too
  small for a float32 counts as the smallest normal one: the least importance.
- Where R is below two bins there is no slope: alpha is +inf.
- Ties go to the earlier token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

#: The last blocks of a document whose mean queries are stored: the first blocks' are never read.
MOST_LOCAL_BLOCKS = 4

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
    receives falls with distance; less is more important. received: float32 [N], the mean share that
    it receives of a later query's attention to the R tokens before that query. Both are over
    distances 1 to R, and +inf where not all of these exist.
    """

    representatives: Tensor
    alpha: Tensor
    received: Tensor


class ReceivedAttention:
    """Attention that each token of a document receives in one layer, from queries in chunks.

    length: tokens of the document. block_size: tokens of a block; the last may be shorter.
    """

    def __init__(self, length: int, block_size: int, device: torch.device | str = "cpu") -> None:
        self._length, self._block_size, self._device = length, block_size, torch.device(device)
        self._seen = 0
        self._begin(None)

    def _begin(self, window: int | None) -> None:
        """Before the first chunk: the range of distances, R, and its bins."""
        most = self._block_size if window is None else min(self._block_size, window - 1)
        self._range = min(most, self._length - 1)
        self._compares = self._range == most
        self._bins = list(pairwise(_edges(self._range + 1)))
        sizes = torch.tensor([far - near for near, far in self._bins], dtype=torch.int64)
        # Of each distance from 1 on its bin.
        self._bin = torch.arange(len(sizes)).repeat_interleave(sizes).to(self._device)
        self._sums = torch.zeros(len(self._bins), self._length, device=self._device)

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
        if start == 0:
            self._begin(window)
        self._seen = end
        most = _MOST_WEIGHTS.get(query.device.type, _MOST_WEIGHTS_ELSEWHERE)
        rows = max(1, math.isqrt(most // (query.shape[1] // keys.shape[1])) - self._range)
        for first in range(start, end, rows) if self._bins else ():
            last = min(end, first + rows)
            low = max(0, first - self._range)
            token = torch.arange(first, last, device=query.device)
            near = token[:, None] - torch.arange(1, self._range + 1, device=query.device)
            part = query[first - start : last - start]
            shares = _shares(part, keys[low:last], near - low, near < 0, scale, softcap)
            self._collect(shares, near)

    def _collect(self, shares: Tensor, near: Tensor) -> None:
        """Adds shares [t, R] of queries in the tokens `near`, by distance; below 0 is none."""
        place = self._bin * self._length + near.clamp(min=0)
        self._sums.view(-1).index_add_(0, place.flatten(), shares.flatten())

    def finish(self) -> BlockStatistics:
        """The statistics of all blocks, once every token has been added."""
        assert self._seen == self._length, "every token is added before the end"
        token = torch.arange(self._length, device=self._device)
        # The distances from which each token is seen.
        number = (self._length - 1 - token).clamp(max=self._range)
        mean = self._sums.sum(0) / number.clamp(min=1)
        blocks = -(-self._length // self._block_size)
        padded = mean.new_full((blocks * self._block_size,), -1.0)
        padded[: self._length] = mean
        place = padded.view(blocks, self._block_size).argmax(1)  # the first of equals
        token = place + torch.arange(blocks, device=self._device) * self._block_size
        whole = (token + 1 >= self._range) & (number[token] == self._range)
        whole &= self._compares and self._range > 0
        received = mean[token].masked_fill(~whole, torch.inf)
        return BlockStatistics(token, self._decay(token).masked_fill(~whole, torch.inf), received)

    def _decay(self, token: Tensor) -> Tensor:
        """Alpha of tokens [N] seen from all distances: log y = c - alpha log distance, by least
        squares; float32 [N].
        """
        if len(self._bins) < 2:
            return torch.full_like(token, torch.inf, dtype=torch.float32)
        sums = self._sums[:, token].double()
        near, far = torch.tensor(self._bins, device=token.device).T[..., None]
        y = (sums / (far - near)).clamp(min=torch.finfo(torch.float32).tiny).log()
        x = ((near + far - 1).double() / 2).log()
        x = x - x.mean(0)
        slope: Tensor = (x * y).sum(0) / (x * x).sum(0)
        return -slope.float()


def _edges(length: int) -> list[int]:
    """First distances of the bins [2^(b/2), 2^((b+1)/2)), and the end; empty bins left out."""
    if length < 2:
        return []
    # d >= 2^(b/2) where d^2 >= 2^b: whole numbers, so that no rounding moves an edge.
    firsts = (math.isqrt((1 << b) - 1) + 1 for b in range(2 * length.bit_length() + 1))
    return [*sorted({d for d in firsts if d < length}), length]


def _shares(
    query: Tensor,
    keys: Tensor,
    near: Tensor,
    absent: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """The shares of the keys `near` in each query's attention to all of these, mean over heads.

    query [t, Hq, D]; keys [n, Hkv, D]; near int64 [t, R], keys of each query; absent bool [t, R],
    where there is none: its share is 0. Returns float32 [t, R].

    Each head's shares, since a head that looks far away leaves less to the last R tokens in longer
    texts, which would change the mixture of heads along the document.
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    group = heads // kv_heads
    total = torch.zeros(near.shape, device=query.device)
    index = near.clamp(min=0).expand(group, -1, -1)
    for head in range(kv_heads):
        own = slice(head * group, (head + 1) * group)
        scores = (query[:, own].transpose(0, 1).float() * scale) @ keys[:, head].float().T
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        part = scores.gather(2, index).masked_fill_(absent, -torch.inf)
        total += part.softmax(-1).sum(0)
    return total.div_(heads).masked_fill_(absent, 0.0)  # a query without keys: NaN

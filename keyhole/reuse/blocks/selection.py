"""Selection of middle blocks: the best of each document, then the best of those over all.

SamKV, section 3.2, last paragraph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def choose(
    scores: Sequence[Tensor], shares: Sequence[float], most: int | None = None
) -> list[Tensor]:
    """The middle blocks to keep in each layer, per document bool [L, m].

    scores: per document float32 [L, m], of its middle blocks; m may differ and be 0. shares: the
    share of them that it wants. In every layer each of the n documents offers its
    `ceil(share * m)` best blocks. Scores are standardised per document and layer over all its
    middle blocks, and of all blocks offered the best are kept, at most `most`; None: their number
    divided by n, rounded up. Equal scores: the earlier document, then the earlier block.
    """
    sizes = [part.shape[1] for part in scores]
    numbers = [math.ceil(share * size) for share, size in zip(shares, sizes, strict=True)]
    offers = [best(part, number) for part, number in zip(scores, numbers, strict=True)]
    offered = torch.cat(offers, 1)
    standard = torch.cat([standardised(part) for part in scores], 1)
    room = math.ceil(sum(numbers) / len(scores)) if most is None else most
    # Blocks that are not offered sort last and are never selected.
    kept = best(standard.masked_fill(~offered, -torch.inf), room)
    return list((kept & offered).split(sizes, 1))


def best(scores: Tensor, number: int) -> Tensor:
    """The `number` largest of each row, the first of equals, bool [L, m]; scores [L, m]."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :number]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)


def fitting(scores: Tensor, sizes: Tensor, room: int) -> Tensor:
    """The largest of each row, in order, while they have at most `room` tokens together.

    scores [L, m]; sizes int64 [m], tokens of each block. The first of equals; bool [L, m].
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    fits = sizes[order].cumsum(1) <= room
    return torch.zeros_like(fits).scatter_(1, order, fits)


def standardised(scores: Tensor) -> Tensor:
    """Scores [L, m] less their row's mean, by its standard deviation (divided by m; 0 counts as 1).

    float64.
    """
    if scores.shape[1] == 0:
        return scores.double()
    spread, mean = torch.std_mean(scores.double(), dim=1, correction=0, keepdim=True)
    return (scores - mean) / torch.where(spread > 0, spread, 1.0)

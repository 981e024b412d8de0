"""A loss for attention that changes slowly, as published curves of large models show it.

In a language of four-word sentences every word looks for something else, and a model that was
trained on answers alone changes its pages from step to step: of the quarter with the largest
attention a third comes again. DELTA's paper (section 3) shows maps of neighbouring layers that are
alike, and SpeContext's (figure 6b) selections of which over 80 % come again at the next step.

The loss says nothing about where something is looked up, nor how much attention it gets: it
compares, over pages that are far from the first and the newest tokens, the logarithms of the
attention of a whole layer, of which facts that are looked up are a few among many.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.tiny_model.curriculum import TrainingBatch

_PAGE = 16
_LEAST = 1e-6
"""Attention below this is as good as none."""


class Steadiness:
    """Collects the attention of some pairs of neighbouring steps, layer after layer.

    Pairs are drawn from the supervised tokens of a batch; without any, the loss is zero.
    """

    def __init__(self, batch: TrainingBatch, rng: Random, pairs: int = 48) -> None:
        length = batch.tokens.shape[1]
        known = {*batch.supervised.tolist()}
        usable = [at for at in sorted(known) if at + 1 in known and at % length >= 4 * _PAGE]
        chosen = torch.tensor(rng.sample(usable, min(pairs, len(usable))), dtype=torch.long)
        chosen = chosen.to(batch.tokens.device)
        self._rows = chosen // length
        first = chosen % length
        self._steps = torch.stack((first, first + 1), 1)
        pages = torch.arange(-(-length // _PAGE), device=chosen.device)
        # Besides the first page and the newest two, which everything attends to.
        self._far = (pages > 0) & (pages < first[:, None] // _PAGE - 1)
        self._before: Tensor | None = None
        self._differences: list[Tensor] = []

    def add(self, queries: Tensor, keys: Tensor) -> None:
        """A layer's rotated queries `[B, Hq, T, D]` and keys `[B, Hkv, T, D]`, unscaled."""
        if not len(self._rows):
            return
        pages = self._pages(queries.float(), keys.float())
        self._differences.append(1 - _correlation(pages[:, 0], pages[:, 1]))
        if self._before is not None:
            self._differences.append(1 - _correlation(self._before, pages[:, 0]))
        self._before = pages[:, 0]

    def loss(self) -> Tensor | float:
        """1 minus the correlation, in the mean over pairs of steps and pairs of layers; 0 to 2."""
        return torch.stack(self._differences).mean() if self._differences else 0.0

    def _pages(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Logarithms of the attention of all heads on each page, centred over the far ones, which
        alone are not zero: `[P, 2, pages]`.
        """
        num_heads, length, size = queries.shape[1:]
        num_kv = keys.shape[1]
        asked = queries[self._rows[:, None], :, self._steps]  # [P, 2, Hq, D]
        asked = asked.unflatten(2, (num_kv, num_heads // num_kv)) * size**-0.5
        scores = torch.einsum("pskgd,pktd->pskgt", asked, keys[self._rows])
        seen = torch.arange(length, device=keys.device) <= self._steps[..., None]
        scores = scores.masked_fill(~seen[:, :, None, None], float("-inf"))
        weights = scores.softmax(-1).sum((2, 3))
        padded = F.pad(weights, (0, -length % _PAGE))
        logs = (padded.unflatten(-1, (-1, _PAGE)).sum(-1) + _LEAST).log()
        far = self._far[:, None]
        mean = (logs * far).sum(-1, keepdim=True) / far.sum(-1, keepdim=True).clamp(min=1)
        centred: Tensor = (logs - mean) * far
        return centred


def _correlation(one: Tensor, other: Tensor) -> Tensor:
    """Of centred values, over the last dimension."""
    sizes = one.square().sum(-1) * other.square().sum(-1)
    found: Tensor = (one * other).sum(-1) / (sizes + _LEAST).sqrt()
    return found

"""Overlap of what layers attend to most: with other layers, and with themselves some steps later.

That neighbouring layers look at the same places is the premise of DELTA, TidalDecode and OmniKV:
one layer selects for others. That neighbouring steps do is the premise of SpeContext's elastic
loading. Both are measured under full attention, over three kinds of lists of `token_budget` tokens:

    pages         one list for all heads; a token's score is its largest weight over the query
                  heads, a page's the sum over its tokens (DELTA)
    head_pages    a list per KV head; the largest weight over the group, summed over the page
    head_tokens   the tokens of largest weight per KV head (TidalDecode, SpeContext, the oracle)

Lists of any two layers overlap by chance, and because most layers look at the first and at the
newest tokens. So two references stand beside every curve: `chance`, the overlap of two random lists
of this size, and `newest`, the share that a list of the first and the newest entries would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.eval.attention import measures
from keyhole.eval.attention.dense_run import LayerStep
from keyhole.eval.attention.repeats import SelectionPersistence
from keyhole.kernels import Selection

KINDS = ("pages", "head_pages", "head_tokens")
#: First entries of the reference list `newest`: StreamingLLM's four sinks, or their page.
_SINKS = {"pages": 1, "head_pages": 1, "head_tokens": 4}


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Of one kind of lists. between_layers: [L][L], the share of a layer's list (column) that is in
    another's (row), over the full-attention layers in their order. by_distance: [texts][L - 1], the
    same by how many of these layers lie between, 1 for neighbours. by_steps: [texts][64]. newest:
    per text. chance: over all.
    """

    between_layers: list[list[float]]
    by_distance: list[list[float]]
    by_steps: list[list[float | None]]
    newest: list[float]
    chance: float


class _List(NamedTuple):
    """Entries of each sequence in a layer, bool [B, H, n], and how many there are, [B]."""

    chosen: Tensor
    valid: Tensor


class OverlapSums:
    """Sums over the steps of a dense run, for one kind of lists and one budget."""

    def __init__(
        self, kind: str, budget: int, geometry: Geometry, samples: int, device: torch.device
    ) -> None:
        self._kind, self._layers = kind, geometry.full_attention
        self._entries = budget if kind == "head_tokens" else budget // geometry.page_size
        depth = len(self._layers)
        self._between = torch.zeros(samples, depth, depth, dtype=torch.float64, device=device)
        self._newest = torch.zeros(samples, dtype=torch.float64, device=device)
        self._chance = torch.zeros(samples, dtype=torch.float64, device=device)
        self._steps = torch.zeros(samples, dtype=torch.float64, device=device)
        self._repeats = SelectionPersistence(samples, device)
        self._now: list[Tensor] = []  # of the layers before, in this step

    def take(self, seen: LayerStep) -> None:
        """Adds a layer of a step."""
        found, rows = self._top(seen), seen.samples
        self._repeats.take(seen, found.chosen)
        first = min(_SINKS[self._kind], self._entries - 1)
        recent = kernels.recent_indices(found.valid, self._entries, first=first)
        listed = measures.members(recent.indices, found.chosen.shape[2])
        self._newest[rows] += measures.found_again(found.chosen, listed.expand_as(found.chosen))
        self._now.append(found.chosen)
        if seen.layer == self._layers[-1]:
            lists = torch.stack(self._now).float()
            both = torch.einsum("ibhn,jbhn->bijh", lists, lists).mean(3)
            valid = found.valid.double()
            length = valid.clamp(max=self._entries)
            self._between[rows] += both.double() / length[:, None, None]
            self._chance[rows] += length / valid
            self._steps[rows] += 1
            self._now = []

    def result(self) -> Overlap:
        """The means."""
        depth = len(self._layers)
        between = self._between / self._steps[:, None, None]
        by_distance = [between.diagonal(distance, 1, 2).mean(1) for distance in range(1, depth)]
        columns = torch.stack(by_distance, 1) if by_distance else between[:, :0, 0]
        return Overlap(
            between_layers=_rounded(between.mean(0)),
            by_distance=_rounded(columns),
            by_steps=self._repeats.shares(),
            newest=_rounded(self._newest / self._steps / depth),
            chance=float(_rounded((self._chance / self._steps).mean())),
        )

    def _top(self, seen: LayerStep) -> _List:
        """The entries of largest weight."""
        scores = seen.weights
        if self._kind == "pages":
            scores = scores.amax(1, keepdim=True)
        else:
            scores = scores.unflatten(1, (seen.num_kv_heads, -1)).amax(2)
        valid, unit = seen.step.lengths, 1
        if self._kind != "head_tokens":
            valid, unit = seen.step.pages, seen.step.page_size
            scores = measures.page_sums(scores, unit)
        chosen: Selection = kernels.top_k(scores, valid, self._entries, unit)
        return _List(measures.members(chosen.indices, scores.shape[2]), valid)


def kinds(geometry: Geometry) -> Sequence[str]:
    """The kinds of lists of a model: those per KV head only where all layers have as many."""
    heads = {geometry.layers[layer].num_kv_heads for layer in geometry.full_attention}
    return KINDS if len(heads) == 1 else KINDS[:1]


def _rounded(values: Tensor) -> Any:
    """As lists, in four decimals."""
    return values.mul(1e4).round().div(1e4).tolist()

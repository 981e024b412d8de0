"""Sums over the steps of a dense run: losses of policies, overlap between layers, and repetition.

DELTA, TidalDecode and OmniKV, in which one layer selects for others, assume that neighbouring
layers attend to the same tokens. SpeContext's elastic loading, which loads only what is new in a
step's selection, assumes the same of neighbouring steps (section 4.3; figure 6b reports that over
80 % repeats between neighbouring steps). Both are measured under full attention, over three kinds
of lists of `token_budget` tokens:

    pages         one list for all heads; a token's score is its largest weight over the query
                  heads, a page's the sum over its tokens (DELTA)
    head_pages    a list per KV head; the largest weight over the group, summed over the page
    head_tokens   the tokens with the largest weights per KV head (TidalDecode, SpeContext, oracle)

Any two layers' lists overlap by chance, and because most layers attend to the first and the newest
tokens. Every curve therefore has two references: `chance`, the overlap of two random lists of this
size, and `newest`, the share of the list that is among the first and the newest entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.eval.attention import dense_run
from keyhole.eval.attention.dense_run import LayerStep
from keyhole.kernels import Selection
from keyhole.kernels.reference import members

#: Number of later steps that a selection is compared with.
MOST_STEPS = 64
#: Steps between selections that are kept: four are held at a time, eight in 128 steps.
_EVERY = 16
_KEPT = MOST_STEPS // _EVERY


class SelectionPersistence:
    """Share of a step's selection that later steps select again, by distance in steps, per text."""

    def __init__(self, samples: int, device: torch.device) -> None:
        shape = (samples, MOST_STEPS + 1)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self._counts = torch.zeros(shape, dtype=torch.float64, device=device)
        # Per layer, kept selections as bool [samples, _KEPT, H, N], and the step of each, or -1.
        self._kept: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def take(self, seen: LayerStep, tokens: Tensor) -> None:
        """Compares what a layer selects now, bool [B, H, N], with its kept selections."""
        rows = seen.samples
        # 1 for the first decode step.
        now = (seen.step.lengths - seen.step.sequences.prompts).long()
        kept, made = self._room(seen.layer, tokens)
        tokens = F.pad(tokens, (0, kept.shape[3] - tokens.shape[2]))
        before = made[rows]
        steps = now[:, None] - before
        compared = (before >= 0) & (steps >= 1) & (steps <= MOST_STEPS)
        shares = dense_run.found_again(kept[rows], tokens[:, None])
        row, place = compared.nonzero(as_tuple=True)
        where = (rows[row], steps[row, place])
        self._sums.index_put_(where, shares[row, place], accumulate=True)
        self._counts.index_put_(where, torch.ones_like(shares[row, place]), accumulate=True)
        keeps = now % _EVERY == 1 % _EVERY
        slot = (now // _EVERY) % _KEPT
        kept[rows[keeps], slot[keeps]] = tokens[keeps]
        made[rows[keeps], slot[keeps]] = now[keeps]

    def shares(self) -> list[list[float | None]]:
        """[texts][64]: mean over layers, lists and kept steps; None if no step was that far."""
        sums, counts = self._sums[:, 1:].tolist(), self._counts[:, 1:].tolist()
        return [
            [round(s / n, 4) if n else None for s, n in zip(*row, strict=True)]
            for row in zip(sums, counts, strict=True)
        ]

    def _room(self, layer: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's kept selections and their steps, enlarged to the current number of tokens."""
        count = tokens.shape[2]
        kept, made = self._kept.get(layer), self._made.get(layer)
        if kept is None or made is None:
            samples = len(self._sums)
            kept = tokens.new_zeros(samples, _KEPT, tokens.shape[1], count)
            made = torch.full((samples, _KEPT), -1, device=tokens.device)
        elif kept.shape[3] < count:
            kept = F.pad(kept, (0, count - kept.shape[3]))
        self._kept[layer], self._made[layer] = kept, made
        return kept, made


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Of one policy, per text and full-attention layer in their order: [texts][layers] each.

    mass: share of full attention's weights on what it reads. error: of the layer's output, relative
    to full attention's. read: tokens read per KV head; how many of its query heads read a token
    does not matter.
    """

    mass: list[list[float]]
    error: list[list[float]]
    read: list[list[float]]


class LossSums:
    """Sums over the steps of a dense run, for every policy of it."""

    def __init__(
        self, layers: Sequence[int], samples: int, num_policies: int, device: torch.device
    ) -> None:
        """layers: those with full attention."""
        self._place = {layer: place for place, layer in enumerate(layers)}
        shape = (3, num_policies, samples, len(layers))
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self._steps = torch.zeros(shape[2:], dtype=torch.float64, device=device)
        self.repeats = SelectionPersistence(samples, device)

    def take(self, seen: LayerStep) -> None:
        """Adds a layer of a step; for the first policy, also how much it selects again in later
        steps.
        """
        place = self._place[seen.layer]
        rows = seen.samples
        self._steps[rows, place] += 1
        for number, reading in enumerate(seen.readings):
            if reading.tokens is None:  # nothing is left out
                mass, error = torch.ones_like(rows), torch.zeros_like(rows)
                read = seen.step.lengths
            else:
                mass = dense_run.mass_kept(seen.weights, reading.tokens)
                error = dense_run.output_error(seen.output, reading.output)
                read = dense_run.tokens_read(reading.tokens, seen.num_kv_heads)
                if number == 0:
                    self.repeats.take(seen, reading.tokens)
            found = torch.stack([mass.double(), error.double(), read.double()])
            self._sums[:, number, rows, place] += found

    def means(self) -> list[Loss]:
        """The losses of each policy."""
        mass, error, read = (self._sums / self._steps).unbind(0)
        return [
            Loss(mass=_listed(mass[i]), error=_listed(error[i]), read=_listed(read[i]))
            for i in range(len(mass))
        ]


def _listed(values: Tensor) -> list[list[float]]:
    """As lists, in six digits, the precision of float32."""
    return [[float(f"{value:.6g}") for value in row] for row in values.tolist()]


KINDS = ("pages", "head_pages", "head_tokens")
#: First entries of the reference list `newest`: StreamingLLM's four sinks, or their page.
_SINKS = {"pages": 1, "head_pages": 1, "head_tokens": 4}


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The overlap of one kind of lists. between_layers: [L][L], the share of a layer's list
    (column) that is in another's (row), over the full-attention layers in order. by_distance:
    [texts][L - 1], the same by the distance of the layers, 1 for neighbours. by_steps: [texts][64].
    newest: per text. chance: over all texts.
    """

    between_layers: list[list[float]]
    by_distance: list[list[float]]
    by_steps: list[list[float | None]]
    newest: list[float]
    chance: float


class _List(NamedTuple):
    """The entries that each sequence selects in a layer, bool [B, H, n], and the number of valid
    entries, [B].
    """

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
        listed = members(recent.indices, found.chosen.shape[2])
        self._newest[rows] += dense_run.found_again(found.chosen, listed.expand_as(found.chosen))
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
            scores = dense_run.page_sums(scores, unit)
        chosen: Selection = kernels.top_k(scores, valid, self._entries, unit)
        return _List(members(chosen.indices, scores.shape[2]), valid)


def kinds(geometry: Geometry) -> Sequence[str]:
    """The kinds of lists of a model: lists per KV head only if all layers have the same number of
    heads.
    """
    heads = {geometry.layers[layer].num_kv_heads for layer in geometry.full_attention}
    return KINDS if len(heads) == 1 else KINDS[:1]


def _rounded(values: Tensor) -> Any:
    """As lists, in four decimals."""
    return values.mul(1e4).round().div(1e4).tolist()

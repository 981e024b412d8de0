"""How much of a selection is selected again 1 to 64 steps later: what elastic loading saves by.

SpeContext loads only what is new in a step's selection (section 4.3; figure 6b says that over 80 %
repeats between neighbouring steps). Every `_EVERY` steps a selection is kept, and compared with
those of the 64 steps after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.eval.attention import measures
from keyhole.eval.attention.dense_run import LayerStep

#: Steps that a selection is compared with.
MOST_STEPS = 64
#: A selection of every so many steps is kept: four at a time, and eight in 128 steps.
_EVERY = 16
_KEPT = MOST_STEPS // _EVERY


class SelectionPersistence:
    """Share of a step's selection found in later ones, by the steps between, per text."""

    def __init__(self, samples: int, device: torch.device) -> None:
        shape = (samples, MOST_STEPS + 1)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self._counts = torch.zeros(shape, dtype=torch.float64, device=device)
        # Per layer bool [samples, _KEPT, H, N], and for each the step it was made in, or -1.
        self._kept: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def take(self, seen: LayerStep, tokens: Tensor) -> None:
        """Compares what a layer selects now, bool [B, H, N], with what was kept of it."""
        rows = seen.samples
        now = (
            seen.step.lengths - seen.step.sequences.prompts
        ).long()  # 1 for the first decode step
        kept, made = self._room(seen.layer, tokens)
        tokens = F.pad(tokens, (0, kept.shape[3] - tokens.shape[2]))
        before = made[rows]
        steps = now[:, None] - before
        compared = (before >= 0) & (steps >= 1) & (steps <= MOST_STEPS)
        shares = measures.found_again(kept[rows], tokens[:, None])
        row, place = compared.nonzero(as_tuple=True)
        where = (rows[row], steps[row, place])
        self._sums.index_put_(where, shares[row, place], accumulate=True)
        self._counts.index_put_(where, torch.ones_like(shares[row, place]), accumulate=True)
        keeps = now % _EVERY == 1 % _EVERY
        slot = (now // _EVERY) % _KEPT
        kept[rows[keeps], slot[keeps]] = tokens[keeps]
        made[rows[keeps], slot[keeps]] = now[keeps]

    def shares(self) -> list[list[float | None]]:
        """[texts][64]: mean over layers, lists and kept steps; None where no step is so late."""
        sums, counts = self._sums[:, 1:].tolist(), self._counts[:, 1:].tolist()
        return [
            [round(s / n, 4) if n else None for s, n in zip(*row, strict=True)]
            for row in zip(sums, counts, strict=True)
        ]

    def _room(self, layer: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What is kept of a layer, with room for as many tokens as there are now."""
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

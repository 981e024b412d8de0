"""What a policy and its controls lose in each layer: means over the steps of every text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.eval.attention import measures
from keyhole.eval.attention.dense_run import LayerStep
from keyhole.eval.attention.repeats import SelectionPersistence


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Of one policy, per text and full-attention layer in their order: [texts][layers] each.

    mass: share of full attention's weights on what it reads. error: of the layer's output, relative
    to full attention's. read: tokens read per KV head, whatever query heads read them.
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
        """Adds a layer of a step. Of the first policy also what it reads again later."""
        place = self._place[seen.layer]
        rows = seen.samples
        self._steps[rows, place] += 1
        for number, reading in enumerate(seen.readings):
            if reading.tokens is None:  # nothing is left out
                mass, error = torch.ones_like(rows), torch.zeros_like(rows)
                read = seen.step.lengths
            else:
                mass = measures.mass_kept(seen.weights, reading.tokens)
                error = measures.output_error(seen.output, reading.output)
                read = measures.tokens_read(reading.tokens, seen.num_kv_heads)
                if number == 0:
                    self.repeats.take(seen, reading.tokens)
            found = torch.stack([mass.double(), error.double(), read.double()])
            self._sums[:, number, rows, place] += found

    def means(self) -> list[Loss]:
        """One for each policy."""
        mass, error, read = (self._sums / self._steps).unbind(0)
        return [
            Loss(mass=_listed(mass[i]), error=_listed(error[i]), read=_listed(read[i]))
            for i in range(len(mass))
        ]


def _listed(values: Tensor) -> list[list[float]]:
    """In six digits, which is what float32 carries."""
    return [[float(f"{value:.6g}") for value in row] for row in values.tolist()]

"""How much of what a step selects was selected by the step before: SpeContext, figure 6b."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.cache.offload.prefetch import Prefetcher
from keyhole.cache.offload.resident_buffer import Resident
from keyhole.kernels import Selection


@dataclass(eq=False)
class SelectionOverlap:
    """Counts over the selections of one sequence after the other.

    steps: those in which anything was selected. selected, repeated: what was, and what of it the
    step before had too; tokens or pages, as the policy selects, once per layer and KV head. First
    steps and those after one that read everything are not compared. Buffers repeat a little more,
    as what a step did not select may still be there in the next.
    """

    steps: int = 0
    selected: int = 0
    repeated: int = 0
    _step: int = 0
    _seen: int = -1
    _last: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    def begin(self) -> None:
        """A step."""
        self._step += 1

    def forget(self) -> None:
        """Another sequence."""
        self._last.clear()

    def record(self, layer: int, selection: Selection) -> None:
        """What a layer reads in this step."""
        self.steps += self._seen != self._step
        self._seen = self._step
        now = selection.indices[0]
        step, last = self._last.get(layer, (-1, now))
        if step == self._step - 1:
            self.selected += int(selection.counts.sum())
            self.repeated += sum(
                int(torch.isin(a[a >= 0], b).sum()) for a, b in zip(now, last, strict=True)
            )
        self._last[layer] = self._step, now.clone()


def recording(repeats: SelectionOverlap) -> type[Prefetcher]:
    """Elastic loading that tells `repeats` of every selection."""

    class Recording(Prefetcher):
        def begin(
            self, rows: Tensor, page_table: Tensor, lengths: Tensor, *, recorded: bool = False
        ) -> None:
            repeats.begin()
            super().begin(rows, page_table, lengths, recorded=recorded)

        def wait(self, layer: int, selection: Selection) -> Resident:
            repeats.record(layer, selection)
            return super().wait(layer, selection)

    return Recording

"""`Traced(policy)`: the same policy, and a record of what every layer read in every decode step.

    traced = Traced(Delta(token_budget=256))
    LLM(model, policy=traced).generate("...")
    traced.trace.pages_read(layer=3)

It wraps the policy and changes nothing: engine and policy do not know of it. The record grows with
every step, so it is for pictures and tests, one sequence or a fixed batch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from keyhole.engine.read_trace import Read, read_of
from keyhole.eval.trace.policy_proxy import PolicyProxy
from keyhole.policies.base import ScoreRequest, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class TracedStep:
    """One decode step: lengths int32 [B], and per layer what it read (None: everything)."""

    lengths: np.ndarray
    page_size: int
    reads: dict[int, Read | None] = field(default_factory=dict)

    def tokens(self, layer: int, row: int = 0) -> np.ndarray:
        """Which tokens of sequence `row` were read, bool [Hkv or 1, length]."""
        length, read = int(self.lengths[row]), self.reads[layer]
        if read is None:
            return np.ones((1, length), bool)
        return read.tokens(row, length)


@dataclass(eq=False)
class Trace:
    """The decode steps in their order; only: layers that it keeps, None for all."""

    steps: list[TracedStep] = field(default_factory=list)
    only: frozenset[int] | None = None
    _step: Step | None = None
    _shared: tuple[Selection | None, Read | None] | None = None

    def record(self, layer: int, selection: Selection | None, step: Step) -> None:
        """Adds what a layer reads; a step not seen before begins a new row."""
        if self.only is not None and layer not in self.only:
            return
        if step is not self._step:
            self._step, self._shared = step, None
            self.steps.append(TracedStep(step.lengths.cpu().numpy(), step.page_size))
        self.steps[-1].reads[layer] = self.read(layer, selection, step)

    def read(self, layer: int, selection: Selection | None, step: Step) -> Read | None:
        """What a layer reads, as positions in the text; None is everything.

        Without what the layer dropped, or was evicted. Layers that share a selection share a Read.
        """
        left = step.retained
        thinned = (left or step).kept_tokens
        if thinned is not None:
            selection = (
                thinned.selection(layer) if selection is None else thinned.within(layer, selection)
            )
        if self._shared is None or selection is not self._shared[0]:
            self._shared = selection, read_of(selection, left, step.page_size)
        return self._shared[1]

    @property
    def layers(self) -> list[int]:
        """The layers that the policy was asked about: those with full attention."""
        return sorted(self.steps[0].reads) if self.steps else []

    def pages_read(self, layer: int, row: int = 0) -> np.ndarray:
        """Share of each page that was read, mean over KV heads: float32 [pages, steps].

        NaN where a page did not exist yet.
        """
        size = self.steps[0].page_size
        last = max(int(step.lengths[row]) for step in self.steps)
        shares = np.full((-(-last // size), len(self.steps)), np.nan, np.float32)
        for column, step in enumerate(self.steps):
            tokens = step.tokens(layer, row).mean(0, dtype=np.float32)
            starts = np.arange(0, len(tokens), size)
            filled = np.minimum(size, len(tokens) - starts)
            shares[: len(starts), column] = np.add.reduceat(tokens, starts) / filled
        return shares


@dataclass(frozen=True)
class Traced(PolicyProxy):
    """A policy that behaves as `inner` and leaves a record in `trace`."""

    trace: Trace = field(default_factory=Trace)

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """As the policy inside; a layer that scores reads everything."""
        requests = self.inner.needs_scores(layer, step)
        if requests and not self.inner.selects_by_own_scores:
            self.trace.record(layer, None, step)
        return requests

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """As the policy inside, recorded."""
        selection = self.inner.select(layer, query, step)
        self.trace.record(layer, selection, step)
        return selection

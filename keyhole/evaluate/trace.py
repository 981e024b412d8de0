"""`Traced(policy)`: the same policy, and a record of what every layer read in every decode step.

    traced = Traced(Delta(token_budget=256))
    LLM(model, policy=traced).generate("...")
    traced.trace.pages_read(layer=3)

It wraps the policy and changes nothing: engine and policy do not know of it. The record grows with
every step, so it is for pictures and tests, one sequence or a fixed batch at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.policy.base import Policy, ScoreRequest, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Read:
    """A Selection on the host: indices int32 [B, Hkv or 1, n], -1 is padding."""

    indices: np.ndarray
    unit: int


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
        indices = read.indices[row]
        seen = np.zeros((len(indices), -(-length // read.unit)), bool)
        for head, chosen in zip(seen, indices, strict=True):
            head[chosen[chosen >= 0]] = True
        return seen.repeat(read.unit, axis=1)[:, :length]


@dataclass(eq=False)
class Trace:
    """The decode steps in their order."""

    steps: list[TracedStep] = field(default_factory=list)
    _step: Step | None = None

    def record(self, layer: int, selection: Selection | None, step: Step) -> None:
        """Adds what a layer reads; a step not seen before begins a new row."""
        if step is not self._step:
            self._step = step
            self.steps.append(TracedStep(step.lengths.cpu().numpy(), step.page_size))
        read = None
        if selection is not None:
            read = Read(selection.indices.cpu().numpy(), selection.unit)
        elif step.remaining is not None:
            read = Read(step.remaining.entries[:, None], step.page_size)
        self.steps[-1].reads[layer] = read

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
class Traced(Policy):
    """A policy that behaves as `inner` and leaves a record in `trace`."""

    inner: Policy
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        # Class variables of a policy; here they are those of the policy inside.
        object.__setattr__(self, "name", self.inner.name)
        object.__setattr__(self, "dense", self.inner.dense)
        object.__setattr__(self, "wants_head", self.inner.wants_head)
        object.__setattr__(self, "shares_pages", self.inner.shares_pages)
        object.__setattr__(self, "head", getattr(self.inner, "head", None))

    def resolve(self, geometry: Geometry) -> Self:
        """Settles the policy inside; the record stays the same object."""
        return dataclasses.replace(self, inner=self.inner.resolve(geometry))

    def most_pages(self, prompt_pages: np.ndarray, page_size: int) -> np.ndarray | None:
        """As the policy inside."""
        return self.inner.most_pages(prompt_pages, page_size)

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """As the policy inside."""
        return self.inner.page_data(layout, page_size)

    def sequence_state(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        """As the policy inside."""
        return self.inner.sequence_state(geometry)

    def sequence_numbers(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        """As the policy inside."""
        return self.inner.sequence_numbers(geometry)

    def before_step(self, step: Step) -> None:
        """As the policy inside."""
        self.inner.before_step(step)

    def on_append(
        self, key_pages: Tensor, data: Mapping[str, Tensor], pages: Tensor, filled: Tensor
    ) -> None:
        """As the policy inside."""
        self.inner.on_append(key_pages, data, pages, filled)

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """As the policy inside; a layer that scores reads everything."""
        requests = self.inner.needs_scores(layer, step)
        if requests:
            self.trace.record(layer, None, step)
        return requests

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """As the policy inside."""
        self.inner.on_scores(layer, scores, step)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """As the policy inside, recorded."""
        selection = self.inner.select(layer, query, step)
        self.trace.record(layer, selection, step)
        return selection

    def after_step(self, step: Step) -> Tensor | None:
        """As the policy inside."""
        return self.inner.after_step(step)

    def attended_keys(self, layer: int, selection: Selection, step: Step) -> Tensor | None:
        """As the policy inside."""
        return self.inner.attended_keys(layer, selection, step)

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """As the policy inside."""
        return self.inner.overhead_bytes(geometry, step)

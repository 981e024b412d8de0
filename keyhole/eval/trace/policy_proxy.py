"""`PolicyProxy(policy)`: forwards every hook to another policy; subclasses observe it.

A subclass overrides the hooks it looks at. All others are handed on here, in one place: a hook that
a wrapper forgot would quietly be that of `Policy`, and the model would run under something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.policies.base import LowRank, Policy, PromptQueries, ScoreRequest, Selection, Step

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class PolicyProxy(Policy):
    """Behaves as `inner`, and has its settings as attributes."""

    capturable: ClassVar[bool | str] = "who looks on is called by the host, in every step"

    inner: Policy

    def __post_init__(self) -> None:
        # Class variables of a policy; here they are those of the policy inside.
        for name in (
            "name",
            "dense",
            "wants_head",
            "shares_pages",
            "page_settings",
            "reads_keys",
            "reads_queries",
            "selects_by_own_scores",
        ):
            object.__setattr__(self, name, getattr(self.inner, name))

    def __getattr__(self, name: str) -> Any:
        # Settings that the engine looks for, such as token_budget. A copy has no `inner` yet.
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def resolve(self, geometry: Geometry) -> Self:
        """Settles the policy inside; everything else stays the same objects."""
        return dataclasses.replace(self, inner=self.inner.resolve(geometry))

    def outside_budget(self) -> str:
        """As the policy inside."""
        return self.inner.outside_budget()

    def dense_layers(self, geometry: Geometry) -> tuple[int, ...]:
        """As the policy inside."""
        return self.inner.dense_layers(geometry)

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """As the policy inside."""
        return self.inner.offloadable(geometry)

    def selection_heads(self, geometry: Geometry) -> int | None:
        """As the policy inside."""
        return self.inner.selection_heads(geometry)

    def page_limit(self, prompt_pages: np.ndarray, page_size: int) -> np.ndarray | None:
        """As the policy inside."""
        return self.inner.page_limit(prompt_pages, page_size)

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

    def reusable(self, known: int, page_size: int) -> int:
        """As the policy inside."""
        return self.inner.reusable(known, page_size)

    def on_prompt_queries(
        self, layer: int, queries: PromptQueries, options: Mapping[str, Any]
    ) -> None:
        """As the policy inside."""
        self.inner.on_prompt_queries(layer, queries, options)

    def on_queries(self, layer: int, query: Tensor, step: Step, options: Mapping[str, Any]) -> None:
        """As the policy inside."""
        self.inner.on_queries(layer, query, step, options)

    def capture_key(self, step: Step) -> Hashable:
        """As the policy inside."""
        return self.inner.capture_key(step)

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """As the policy inside."""
        return self.inner.needs_scores(layer, step)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """As the policy inside."""
        self.inner.on_scores(layer, scores, step)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """As the policy inside."""
        return self.inner.select(layer, query, step)

    def low_rank(self, layer: int, step: Step) -> LowRank | None:
        """As the policy inside."""
        return self.inner.low_rank(layer, step)

    def after_step(self, step: Step) -> Tensor | None:
        """As the policy inside."""
        return self.inner.after_step(step)

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """As the policy inside."""
        return self.inner.overhead_bytes(geometry, step)

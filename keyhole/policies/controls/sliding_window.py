"""Sliding window: a step reads the newest tokens and nothing else.

The simplest bound on the tokens that a step reads (Longformer, Beltagy et al., arXiv 2004.05150,
section 3.1, used here at decode time only). Tokens outside the window stay in the cache but are not
read.

Cost per step and layer: `token_budget` keys and values.

When to use it: where only recent tokens matter; older tokens are never read.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, require_layers_of, setting
from keyhole.policies.base import Policy, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Policy):
    """The last `token_budget` tokens."""

    name: ClassVar[str] = "sliding_window"
    capturable: ClassVar[bool | str] = True
    token_budget: int = setting(1024, "tokens a step reads per KV head: the window")
    full_layers: tuple[int, ...] = setting((), "layers that read everything")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks the budget."""
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        require(is_count(self.token_budget), "token_budget", self.token_budget, "at least 1")
        return self

    def capture_key(self, step: Step) -> Hashable:
        """Whether everything is read."""
        return step.max_length <= self.token_budget

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The newest tokens, the same for all heads."""
        if layer in self.full_layers or step.max_length <= self.token_budget:
            return None
        return kernels.recent_indices(step.lengths, self.token_budget)

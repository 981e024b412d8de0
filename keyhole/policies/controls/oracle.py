"""Oracle: the tokens of largest true attention weight in this layer at this step.

Not a published method, and it saves nothing: every layer computes all its attention weights, keeps
the `token_budget` tokens of largest weight per KV head (the largest among the query heads of the
group, the newest token always) and attends to these alone. It bounds the quality of any selection
of that many tokens.

Cost per step and layer: all keys and values once for the weights, then `token_budget` again. The
keys read for the selection are not counted, as no real method could select this way.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, require_layers_of, setting
from keyhole.policies.base import Policy, ScoreRequest, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Oracle(Policy):
    """The `token_budget` tokens of largest true attention weight, per KV head; a control."""

    name: ClassVar[str] = "oracle"
    capturable: ClassVar[bool | str] = True
    selects_by_own_scores: ClassVar[bool] = True
    token_budget: int = setting(1024, "tokens a step reads per KV head, the newest among them")
    full_layers: tuple[int, ...] = setting((), "layers that read everything")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks the budget."""
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        require(is_count(self.token_budget), "token_budget", self.token_budget, "at least 1")
        return self

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """None: a layer's weights need all its keys."""
        return ()

    def capture_key(self, step: Step) -> Hashable:
        """Whether everything is read."""
        return step.max_length <= self.token_budget

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """The weights of every token, the largest of each group of heads."""
        if layer in self.full_layers or step.max_length <= self.token_budget:
            return ()
        return (ScoreRequest("group_max", 1),)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """Selects for this layer alone."""
        step.shared_selection = kernels.top_k(scores[0], step.lengths, self.token_budget, 1, last=1)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """This layer's own selection; everything in full layers."""
        return None if layer in self.full_layers else step.shared_selection

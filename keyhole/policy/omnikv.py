"""OmniKV: a few filter layers read everything and choose the tokens that all heads of the layers
after them read.

Hao et al., OmniKV: Dynamic Context Selection for Efficient Long-Context LLMs, ICLR 2025
(openreview.net/forum?id=ulCAPXYXfa), section 4 and algorithm 1: within a step, neighbouring layers
look for much the same tokens. A token's score is the largest attention weight that any query head
of the newest token gives it. Layers before the first filter read everything; keys and values of the
layers that a filter serves may live on a lower tier, from which only the choice is loaded.

Cost per step: full and filter layers read the whole cache, the others `token_budget` tokens.

Differences from the paper: generated tokens are chosen among and count in the budget (the authors'
code chooses among the prompt's and reads all generated ones); the newest token is always read. Of
the paper's selectors this is the one by the newest token, with weights as the authors'
"softmax_before_last" (their "last" compares products before the softmax). The authors' filters are
layers 2, 8 and 18 of 32; the default scales these to the depth, among layers with full attention.
They let the layer after each filter read everything, so that copies have time to arrive: name it
in `full_layers` for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, require_layers, setting
from keyhole.policy import choosing_layers
from keyhole.policy.base import Policy, ScoreRequest, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OmniKV(Policy):
    """One list of tokens for all heads, by the largest attention weight in the filter before."""

    name: ClassVar[str] = "omnikv"
    capturable: ClassVar[bool | str] = True
    token_budget: int = setting(1024, "tokens a sparse layer reads")
    full_layers: tuple[int, ...] = setting((0, 1), "layers that read everything")
    filter_layers: tuple[int, ...] | None = setting(
        None, "layers that choose; None: 2, 8 and 18 of 32, by depth"
    )

    def resolve(self, geometry: Geometry) -> Self:
        """Settles the filter layers: as given, or scaled to the depth."""
        require(is_count(self.token_budget), "token_budget", self.token_budget, "at least 1")
        require_layers("full_layers", self.full_layers)
        layers = self.filter_layers
        layers = default_filter_layers(geometry) if layers is None else layers
        layers = choosing_layers.settled("filter_layers", layers, geometry)
        return dataclasses.replace(self, filter_layers=layers)

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """The layers that a filter serves."""
        return choosing_layers.served(self.filter_layers, self.full_layers, geometry)

    def branch(self, step: Step) -> Hashable:
        """Whether everything is read."""
        return step.max_length <= self.token_budget

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """Filter layers score tokens: the largest weight over all heads."""
        if layer not in (self.filter_layers or ()) or step.max_length <= self.token_budget:
            return ()
        return (ScoreRequest("max", 1),)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """Chooses the tokens for the layers that follow."""
        step.carry = kernels.top_indices(scores[0], step.lengths, self.token_budget, 1, last=1)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The tokens of the filter before; everything in full layers and before the first."""
        return None if layer in self.full_layers else step.carry


def default_filter_layers(geometry: Geometry) -> tuple[int, ...]:
    """The authors' {2, 8, 18} of 32 layers scaled to this depth, among full-attention layers."""
    depth = geometry.num_layers
    # Two layers are dense and at least one must read what a filter chose; shallow models have
    # fewer filters.
    first = min(2, depth - 1)
    second = max(first + 2, round(depth / 4))
    third = max(second + 2, round(9 / 16 * depth))
    return choosing_layers.nearest(
        [first, *(layer for layer in (second, third) if layer < depth)], geometry
    )

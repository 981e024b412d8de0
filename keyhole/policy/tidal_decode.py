"""TidalDecode: a selection layer reads everything and chooses tokens, the layers after it read
these; one layer in the middle chooses again.

Yang et al., TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse Attention,
ICLR 2025 (arXiv 2410.05076), section 3, figure 2 and algorithm 1: tokens that score high in one
layer score high in the next ones too. Each KV head takes the `token_budget` tokens of largest
attention weight, the largest among its query heads; all layers before the first selection layer
read everything. The choice is made anew at every token and nothing is evicted.

Cost per step: full and selection layers read the whole cache, the others `token_budget` tokens.

Differences from the paper: query heads of a group share their choice, by the largest weight among
them (the authors' code chooses per query head, where weights and products have the same order), and
all heads that share latents (MLA) are one group; the newest token is always read. The authors' code
selects in layers 2 and 13 of 32; the default scales these to the depth, among layers with full
attention. The paper's correction of the cache, a prefill of generated tokens from time to time, is
left out.
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
class TidalDecode(Policy):
    """Per KV head the tokens of largest attention weight in the selection layer before."""

    name: ClassVar[str] = "tidal_decode"
    capturable: ClassVar[bool | str] = True
    token_budget: int = setting(1024, "tokens a sparse layer reads per KV head")
    full_layers: tuple[int, ...] = setting((0, 1), "layers that read everything")
    selection_layers: tuple[int, ...] | None = setting(
        None, "layers that choose; None: 2 and 13 of 32, by depth"
    )

    def resolve(self, geometry: Geometry) -> Self:
        """Settles the selection layers: as given, or scaled to the depth."""
        require(is_count(self.token_budget), "token_budget", self.token_budget, "at least 1")
        require_layers("full_layers", self.full_layers)
        layers = self.selection_layers
        layers = default_selection_layers(geometry) if layers is None else layers
        layers = choosing_layers.settled("selection_layers", layers, geometry)
        return dataclasses.replace(self, selection_layers=layers)

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """The sparse layers after the first one that chooses."""
        return choosing_layers.served(self.selection_layers, self.full_layers, geometry)

    def branch(self, step: Step) -> Hashable:
        """Whether everything is read."""
        return step.max_length <= self.token_budget

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """Selection layers score tokens: the largest weight of each group of heads."""
        if layer not in (self.selection_layers or ()) or step.max_length <= self.token_budget:
            return ()
        return (ScoreRequest("group_max", 1),)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """Chooses the tokens of each KV head for the layers that follow."""
        step.carry = kernels.top_indices(scores[0], step.lengths, self.token_budget, 1, last=1)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The tokens of the selection layer before; everything in full layers and before it."""
        return None if layer in self.full_layers else step.carry


def default_selection_layers(geometry: Geometry) -> tuple[int, ...]:
    """The authors' {2, 13} of 32 layers scaled to this depth, among full-attention layers."""
    depth = geometry.num_layers
    # At least one layer must read the first choice; in shallow models there may be no second one.
    second = max(4, round(13 / 32 * depth))
    wanted = {min(2, depth - 1), second} if second < depth else {min(2, depth - 1)}
    return choosing_layers.nearest(wanted, geometry)

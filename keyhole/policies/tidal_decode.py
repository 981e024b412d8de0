"""TidalDecode: a selection layer reads everything and selects tokens for the layers after it; one
layer in the middle selects again.

Yang et al., TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse Attention,
ICLR 2025 (arXiv 2410.05076), section 3, figure 2 and algorithm 1: tokens that score high in one
layer score high in the next ones too. Each head takes the `token_budget` tokens of largest
attention weight; all layers before the first selection layer read everything. The selection is
recomputed at every token and nothing is evicted. The authors publish two forms of it
(github.com/DerrickYLJ/TidalDecode): code for accuracy, and kernels for models without grouped
heads.

Cost per step: full and selection layers read the whole cache, the others `token_budget` tokens.

When to use it: where a few layers may read the whole cache, and tokens rather than pages should be
selected.

Differences (theirs | ours | effect measured):
- every query head takes its own tokens, by its products | the query heads of a KV head share one
  selection, by the largest weight among them, so that a key is read once for all of them and layers
  can be offloaded; `share_group=False` is theirs. Heads that share latents (MLA) are one group |
  with layer 1 as selection layer, at a budget of 128: 0 % (0 to 7.4) either way; at 256: shared 2.1
  % (0.4 to 10.9) with 1,159 KiB read per step, per query head 18.8 % (10.2 to 31.9) with 2,633 KiB
- the newest token competes with the others in the accuracy code and is always read by the kernels |
  it is always read; `window_size` reads more of the newest | not measured: every policy here reads
  the newest token
- layers 2 and 13 of 32 select in the accuracy code, 2 and 12 in the model of the kernels | 2 and 13
  scaled to the depth, among layers with full attention; `selection_layers` | not measured: the
  bundled model looks things up in layers 0 to 2, and whatever keeps these dense answers everything
- the layer after a selection layer is sparse; no sinks, no window | the same by default;
  `full_layers`, `sink_size` and `window_size` for comparisons on equal terms, within the budget |
  none by default
- the paper corrects the cache by a prefill of generated tokens from time to time; the authors' code
  does not | left out | not measured
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import require_counts, require_layers_of, setting
from keyhole.errors import ConfigError
from keyhole.policies import base
from keyhole.policies.base import Policy, ScoreRequest, Selection, Selects, Step
from keyhole.policies.selection_layers import dense, nearest, served, settled

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TidalDecode(Policy):
    """Per KV head the tokens of largest attention weight in the selection layer before."""

    name: ClassVar[str] = "tidal_decode"
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = True
    selects: ClassVar[Selects | None] = "by_scores"
    token_budget: int = setting(1024, "tokens a sparse layer reads per KV head")
    full_layers: tuple[int, ...] = setting((0, 1), "layers that read everything")
    selection_layers: tuple[int, ...] | None = setting(
        None, "layers that select tokens; None: 2 and 13 of 32, by depth"
    )

    sink_size: int = setting(0, "first tokens that are always read")
    window_size: int | None = setting(
        None, "newest tokens that are always read; None: the newest one"
    )

    share_group: bool = setting(
        True, "the query heads of a KV head share one selection; False: one for each, as published"
    )

    @classmethod
    def as_published(cls, geometry: Geometry, token_budget: int) -> Self:
        """The authors' settings, layers scaled to the depth: a selection per query head."""
        return cls(token_budget=token_budget, share_group=False)

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves the selection layers: as given, or scaled to the depth."""
        require_counts(self, "token_budget")
        base.always_read(self.sink_size, self.window_size, self.token_budget)
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        self._require_alike(geometry)
        layers = self.selection_layers
        layers = default_selection_layers(geometry) if layers is None else layers
        layers = settled("selection_layers", layers, geometry)
        return dataclasses.replace(self, selection_layers=layers)

    def _require_alike(self, geometry: Geometry) -> None:
        """ConfigError if layers that share a selection have different numbers of its lists."""
        layouts = [geometry.layers[i] for i in geometry.full_attention]
        what, counts = "query", {layout.num_query_heads for layout in layouts}
        if self.share_group:
            what, counts = "KV", {layout.num_kv_heads for layout in layouts}
        if len(counts) > 1:
            raise ConfigError(
                f"policy {self.name!r} with share_group={self.share_group} makes one selection per "
                f"{what} head for several layers, but this model's layers have {sorted(counts)} "
                f"{what} heads; use delta or quest"
            )

    def dense_layers(self, geometry: Geometry) -> tuple[int, ...]:
        """Full layers, selection layers, and those before the first of them."""
        return dense(self.selection_layers, self.full_layers, geometry)

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """The sparse layers after the first selection layer.

        ConfigError for a selection per query head.
        """
        base.require_shared_group(self.name, self.share_group)
        return served(self.selection_layers, self.full_layers, geometry)

    def token_scores(self, geometry: Geometry) -> int:
        """The largest weight of each group, or each head's."""
        heads = (layer.num_kv_heads for layer in geometry.layers)
        return max(heads) if self.share_group else geometry.num_query_heads

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """Selection layers score tokens: the largest weight of each group, or each head's."""
        if layer not in (self.selection_layers or ()) or self._reads_all(step):
            return ()
        return (ScoreRequest("group_max" if self.share_group else "none", 1),)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """Selects the tokens of each KV head, or query head, for the layers that follow."""
        first, last = self.sink_size, self.window_size or 1
        step.shared_selection = kernels.top_k(
            scores[0], step.lengths, self.token_budget, 1, first=first, last=last
        )

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The tokens of the selection layer before; everything in full layers and before it."""
        return None if layer in self.full_layers else step.shared_selection


def default_selection_layers(geometry: Geometry) -> tuple[int, ...]:
    """The authors' {2, 13} of 32 layers scaled to this depth, among full-attention layers."""
    depth = geometry.num_layers
    # At least one layer must read the first selection; in shallow models there may be no second
    # one.
    second = max(4, round(13 / 32 * depth))
    wanted = {min(2, depth - 1), second} if second < depth else {min(2, depth - 1)}
    return nearest(wanted, geometry)

"""OmniKV: a few filter layers read everything and select the tokens that all heads of the layers
after them read.

Hao et al., OmniKV: Dynamic Context Selection for Efficient Long-Context LLMs, ICLR 2025
(openreview.net/forum?id=ulCAPXYXfa), section 4 and algorithm 1: within a step, neighbouring layers
attend to similar tokens. A token's score is its largest attention weight over all query heads of
the newest token. Layers before the first filter read everything; keys and values of the layers that
a filter serves may be offloaded (RAM or disk); only the selection is then loaded. The authors'
code: github.com/antgroup/OmniKV.

Cost per step: full and filter layers read the whole cache, the others `token_budget` tokens.

When to use it: where most layers are offloaded: the tokens that they need are known several layers
ahead.

Differences (theirs | ours | effect measured):
- a filter selects among the prompt's tokens, by a softmax over these; all generated tokens are read
  outside the budget | generated tokens compete and count in the budget, which bounds what a step
  reads; `keep_generated=True` is theirs | with layer 1 as filter, at a budget of 128: ours 0 % (0
  to 7.4) with 904 KiB read per step, theirs 81.2 % (68.1 to 89.8) with 1,444 KiB; at 256: 0 % (0 to
  7.4) with 1,155 KiB and 100 % (92.6 to 100) with 1,650 KiB, of 1,728 KiB for everything. Of 1,024
  tokens 295 are the prompt's here: theirs reads nearly everything
- the layer after each filter reads everything too, while copies arrive (one in their example, two
  if not given) | `dense_after`, one by default, zero in models where no sparse layer would be left
  | not measured: the bundled model looks things up in layers 0 to 2, and whatever keeps these dense
  answers everything
- the budget is a share of the prompt (0.067 in their example) or a number (4,096 if not given) | a
  number of tokens | none at the same number
- a token's score is its largest product before the softmax in their example ("last"), its largest
  weight if not given ("softmax_before_last"), or a sum over the last 16 queries ("uniform", "exp"),
  which always reads the prompt's tokens among these 16 | its largest weight by the newest token;
  `window_size` for newest tokens | not measured
- layers 2, 8 and 18 of 32 are filters | scaled to the depth, among layers with full attention;
  `filter_layers` | not measured: as for `dense_after`
- no sinks | the same by default; `sink_size`, within the budget | none by default
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, require_counts, require_layers_of, setting
from keyhole.policies import base, selection_layers
from keyhole.policies.base import Policy, ScoreRequest, Selection, Selects, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OmniKV(Policy):
    """One list of tokens for all heads, by the largest attention weight in the filter before."""

    name: ClassVar[str] = "omnikv"
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = True
    selects: ClassVar[Selects | None] = "by_scores"
    token_budget: int = setting(1024, "tokens a sparse layer reads")
    full_layers: tuple[int, ...] = setting((0, 1), "layers that read everything")
    filter_layers: tuple[int, ...] | None = setting(
        None, "layers that select tokens; None: 2, 8 and 18 of 32, by depth"
    )

    sink_size: int = setting(0, "first tokens that are always read")
    window_size: int | None = setting(
        None, "newest tokens that are always read; None: the newest one"
    )
    dense_after: int | None = setting(
        None, "layers after each filter that read everything; None: 1, or 0 if none were left"
    )
    keep_generated: bool = setting(
        False, "read all generated tokens, outside the budget, and select among the prompt's"
    )

    @classmethod
    def as_published(cls, geometry: Geometry, token_budget: int) -> Self:
        """The authors' settings, layers scaled to the depth: all generated tokens are read."""
        return cls(token_budget=token_budget, keep_generated=True)

    def outside_budget(self) -> str:
        """Generated tokens, if `keep_generated`."""
        return "all generated tokens" if self.keep_generated else ""

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves the filter layers, as given or scaled to the depth, and those after them."""
        require_counts(self, "token_budget")
        base.always_read(self.sink_size, self.window_size, self.token_budget)
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        layers = self.filter_layers
        layers = default_filter_layers(geometry) if layers is None else layers
        layers = selection_layers.settled("filter_layers", layers, geometry)
        after = 1 if self.dense_after is None else self.dense_after
        require(is_count(after, 0), "dense_after", after, "at least 0, or None")
        full = {*self.full_layers, *selection_layers.following(layers, after, geometry)}
        if self.dense_after is None and not selection_layers.served(layers, tuple(full), geometry):
            after, full = 0, set(self.full_layers)
        return dataclasses.replace(
            self, filter_layers=layers, dense_after=after, full_layers=tuple(sorted(full))
        )

    def dense_layers(self, geometry: Geometry) -> tuple[int, ...]:
        """Full layers, filters, and those before the first of them."""
        return selection_layers.dense(self.filter_layers, self.full_layers, geometry)

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """The layers that a filter serves. ConfigError if generated tokens are kept."""
        base.require_in_budget(self, "keep_generated=False")
        return selection_layers.served(self.filter_layers, self.full_layers, geometry)

    def token_scores(self, geometry: Geometry) -> int:
        """The largest weight over the heads, or each head's, with a copy of those of the prompt."""
        return 2 * geometry.num_query_heads if self.keep_generated else 1

    def capture_key(self, step: Step) -> Hashable:
        """Whether everything is read; None where the number of generated tokens sets the shapes."""
        reads_all = self._reads_all(step)
        return None if self.keep_generated and not reads_all else reads_all

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """Filter layers score tokens: the largest weight over all heads, or each head's."""
        if layer not in (self.filter_layers or ()) or self._reads_all(step):
            return ()
        return (ScoreRequest("none" if self.keep_generated else "max", 1),)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """Selects the tokens for the layers that follow."""
        budget, sinks = self.token_budget, self.sink_size
        if not self.keep_generated:
            last = self.window_size or 1
            step.shared_selection = kernels.top_k(
                scores[0], step.lengths, budget, 1, first=sinks, last=last
            )
            return
        own, last = kernels.prompt_scores(scores[0], step.sequences.prompts), self.window_size or 0
        chosen = kernels.top_k(own, step.sequences.prompts, budget, 1, first=sinks, last=last)
        most = int((step.sequences.host_lengths - step.sequences.host_prompts).max())
        step.shared_selection = kernels.with_newer(
            chosen, step.sequences.prompts, step.lengths, most
        )

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The tokens of the filter before; everything in full layers and before the first."""
        return None if layer in self.full_layers else step.shared_selection


def default_filter_layers(geometry: Geometry) -> tuple[int, ...]:
    """The authors' {2, 8, 18} of 32 layers scaled to this depth, among full-attention layers."""
    depth = geometry.num_layers
    # Two layers are dense and at least one must read a filter's selection; shallow models have
    # fewer filters.
    first = min(2, depth - 1)
    second = max(first + 2, round(depth / 4))
    third = max(second + 2, round(9 / 16 * depth))
    return selection_layers.nearest(
        [first, *(layer for layer in (second, third) if layer < depth)], geometry
    )

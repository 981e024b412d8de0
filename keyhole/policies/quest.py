"""Quest: every page stores the elementwise bounds of its keys; a query reads the pages with the
largest upper bound on its score.

Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, ICML 2024
(arXiv 2406.10774), section 3.3 and algorithm 1. The authors publish two forms of it
(github.com/mit-han-lab/Quest): code for accuracy, and kernels for models without grouped heads.

Cost per step and layer: two summary keys per page, then `token_budget` keys and values.

When to use it: for long prompts where each step may need a different part. Nothing is evicted,
trained or calibrated.

Differences (theirs | ours | effect measured):
- every query head reads its own pages | the query heads of a KV head share one selection, by the
  largest bound among them, so that a key is read once for all of them and layers can be offloaded;
  `share_group=False` is theirs | at a budget of 128: shared 6.2 % (2.1 to 16.8) with 958 KiB read
  per step, per query head 93.8 % (83.2 to 97.9) with 1,613 KiB; at 256: 56.2 % (42.3 to 69.3) with
  1,178 KiB and 95.8 % (86.0 to 98.8) with 2,637 KiB. Per query head at a budget of 64, which reads
  about as many bytes as shared at 256: 56.2 % (42.3 to 69.3) with 1,103 KiB. A key that two heads
  of a group select counts twice
- bounds are updated with every appended key, in prefill and decoding | the same | none
- the newest page competes with the others in the accuracy code and is always read by the kernels |
  it is always read; `window_size` reads more of the newest | not measured: every policy here reads
  the newest token
- at least 3 pages are read, whatever the budget | the budget holds, from one page on | none from 3
  pages on
- layers 0 and 1 read everything; no sinks, no window | the same by default; `full_layers`,
  `sink_size` and `window_size` for comparisons on equal terms, within the budget | none by default
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import setting
from keyhole.policies import base
from keyhole.policies.base import Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Quest(base.BestPages):
    """The `token_budget / page_size` pages of highest upper bound, per KV head."""

    name: ClassVar[str] = "quest"
    full_layers: tuple[int, ...] = setting((0, 1), "layers that read everything")
    share_group: bool = setting(
        True, "the query heads of a KV head share one selection; False: one for each, as published"
    )

    @classmethod
    def as_published(cls, geometry: Geometry, token_budget: int) -> Self:
        """The authors' settings: a selection per query head."""
        return cls(token_budget=token_budget, share_group=False)

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """All layers except the dense ones. ConfigError for a selection per query head."""
        base.require_shared_group(self.name, self.share_group)
        return self._sparse_layers(geometry)

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """The lowest and the highest number of each key dimension in the page."""
        shape = (layout.num_kv_heads, layout.key_dim)
        return {"low": shape, "high": shape}

    def on_append(
        self, key_pages: Tensor, data: Mapping[str, Tensor], pages: Tensor, filled: Tensor
    ) -> None:
        """Recomputes the bounds of the pages that were written."""
        kernels.page_bounds(key_pages, data["low"], data["high"], pages, filled)

    def page_scores(self, layer: int, query: Tensor, step: Step) -> Tensor:
        """The upper bounds, of each KV head or query head."""
        data = step.cache.page_data[layer]
        bounds = (query, data["low"], data["high"], step.page_table)
        if self.share_group:
            return kernels.bound_scores(*bounds)
        return kernels.bound_scores_per_query_head(*bounds)

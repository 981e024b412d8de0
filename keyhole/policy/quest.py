"""Quest: every page keeps the elementwise bounds of its keys; a query reads the pages whose upper
bound on its score is largest.

Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, ICML 2024
(arXiv 2406.10774), section 3.3 and algorithm 1.

Cost per step and layer: two summary keys per page, then `token_budget` keys and values.

Differences from the paper: summaries cover generated tokens too (the published code summarises the
prompt only); the query heads of a group share their choice, by the largest bound among them; the
newest page is always read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import is_count, require, require_layers, setting
from keyhole.policy.base import Policy, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Quest(Policy):
    """The `token_budget / page_size` pages of highest upper bound, per KV head."""

    name: ClassVar[str] = "quest"
    capturable: ClassVar[bool | str] = True
    token_budget: int = setting(1024, "tokens a step reads per KV head, in whole pages")
    full_layers: tuple[int, ...] = setting((0, 1), "layers that read everything")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks that the budget holds a page."""
        size = geometry.page_size
        right = f"at least one page of {size} tokens"
        require(is_count(self.token_budget, size), "token_budget", self.token_budget, right)
        require_layers("full_layers", self.full_layers)
        return self

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """All but those that read everything."""
        return tuple(i for i in geometry.full_attention if i not in self.full_layers)

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """The lowest and the highest number of each key dimension in the page."""
        shape = (layout.num_kv_heads, layout.key_dim)
        return {"low": shape, "high": shape}

    def on_append(
        self, key_pages: Tensor, data: Mapping[str, Tensor], pages: Tensor, filled: Tensor
    ) -> None:
        """Recomputes the bounds of the pages that were written."""
        kernels.page_bounds(key_pages, data["low"], data["high"], pages, filled)

    def branch(self, step: Step) -> Hashable:
        """Whether everything is read."""
        return self._covers(step)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The best pages of each KV head, the newest page among them."""
        if layer in self.full_layers or self._covers(step):
            return None
        data = step.page_data[layer]
        scores = kernels.bound_scores(query, data["low"], data["high"], step.page_table)
        if step.thinned is not None:  # pages of documents that this layer has nothing of
            there = step.thinned.pages(layer, scores.shape[2], step.page_size)
            scores = scores.masked_fill(~there[:, None], float("-inf"))
        budget = self.token_budget // step.page_size
        return kernels.top_indices(scores, step.pages, budget, step.page_size, last=1)

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """The summaries of all pages in all sparse layers."""
        if self._covers(step):
            return None
        sparse = [i for i in geometry.full_attention if i not in self.full_layers]
        layouts = [geometry.layers[i] for i in sparse]
        numbers = sum(2 * layout.num_kv_heads * layout.key_dim for layout in layouts)
        return step.pages * (numbers * geometry.itemsize)

    def _covers(self, step: Step) -> bool:
        return step.max_length <= self.token_budget // step.page_size * step.page_size

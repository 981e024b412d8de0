"""ClusterKV: keys of one direction form a cluster, wherever they stand; a query reads the clusters
whose centroids it scores highest.

Liu et al., ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression, 2024
(arXiv 2412.03213). Behind the prompt the keys of every KV head, the first tokens apart, are put
into prompt length / `cluster_size` clusters by k-means of cosine similarity; the generated ones
follow, `cluster_every` at a time, into clusters of their own, and are read in full until then. A
centroid is the mean of its keys, a cluster's score the query's product with it. Clusters are taken
by score until the budget is full; of the last one the earliest tokens.

Cost per step and layer: a centroid per `cluster_size` tokens and the cluster of every token, then
`token_budget` keys and values; behind the prompt ten rounds of k-means.

Differences from the paper: first and recent tokens count in the budget; the query heads of a group
share their choice, by the largest score among them; k-means begins with evenly spaced keys, not
random ones, and generated tokens get one cluster per `cluster_size` too (four per 320, as the paper
says; the published code makes eight). Cluster numbers depend on the whole prompt, so that a known
start of a prompt is copied, not shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from keyhole import kernels
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import is_count, require, require_layers, setting
from keyhole.policy.base import Policy, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


# Numbers of centroids are rounded up to multiples of this.
_ROUNDED = 64


@dataclass(frozen=True, kw_only=True)
class ClusterKV(Policy):
    """First and recent tokens, and the clusters of keys whose centroids score highest."""

    name: ClassVar[str] = "clusterkv"
    shares_pages: ClassVar[bool] = False
    capturable: ClassVar[bool | str] = True
    token_budget: int = setting(1024, "tokens a step reads per KV head, sinks and recent included")
    full_layers: tuple[int, ...] = setting((0, 1), "layers that read everything")
    sink_size: int | None = setting(
        None, "first tokens that are always read; None: 16, or an eighth of a smaller budget"
    )
    cluster_size: int = setting(80, "tokens per cluster, on average")
    cluster_every: int | None = setting(
        None, "generated tokens clustered at once; None: 320, or a third of a smaller budget"
    )

    def resolve(self, geometry: Geometry) -> Self:
        """Settles sinks and interval; checks that they fit into the budget."""
        budget = self.token_budget
        require(is_count(budget), "token_budget", budget, "at least 1")
        require_layers("full_layers", self.full_layers)
        require(is_count(self.cluster_size), "cluster_size", self.cluster_size, "at least 1")
        sinks, every = self.sink_size, self.cluster_every
        sinks = min(16, budget // 8) if sinks is None else sinks
        every = max(1, min(320, budget // 3)) if every is None else every
        require(is_count(sinks, 0), "sink_size", sinks, "at least 0")
        require(is_count(every), "cluster_every", every, "at least 1")
        right = f"at least {sinks + every}: sink_size {sinks} and cluster_every {every}"
        require(budget >= sinks + every, "token_budget", budget, right)
        return dataclasses.replace(self, sink_size=sinks, cluster_every=every)

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """All but those that read everything."""
        return tuple(i for i in geometry.full_attention if i not in self.full_layers)

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """The cluster of each token, and room for the centroids of the sequence.

        A sequence has at most one cluster for so many tokens as the smallest holds on average, one
        more at most; its pages have room for them in order.
        """
        smallest = min(self.cluster_size, self._every)
        heads, slots = layout.num_kv_heads, -(-page_size // smallest)
        return {"centroid": (slots, heads, layout.key_dim), "cluster": (heads, page_size)}

    def before_step(self, step: Step) -> None:
        """Clusters the prompts of new sequences, and generated tokens when there are enough."""
        prompts, made = step.host_prompts, self._ends(step.host_prompts, step.host_lengths)
        crossing = self._crossing(step)
        for row in np.flatnonzero(self._due(step)).tolist():
            prompt, end = int(prompts[row]), int(made[row])
            if crossing[row]:
                self._form(step, row, (self._sinks, prompt), 0)
            first = prompt if crossing[row] else end - self._every
            for start in range(first, end, self._every):
                before = int(self._count(np.asarray(prompt), np.asarray(start + 1)))
                self._form(step, row, (start, start + self._every), before)

    def branch(self, step: Step) -> Hashable:
        """How many centroids are read, 0 where all keys are; not where clusters are made."""
        if self._due(step).any():
            return None
        return 0 if step.max_length <= self.token_budget else self._most(step)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The tokens of each KV head's best clusters, the first and the recent ones among them."""
        if layer in self.full_layers or step.max_length <= self.token_budget:
            return None
        data = step.page_data[layer]
        ends = self._ends(step.prompts, step.lengths)
        stored = data["centroid"], data["cluster"], step.page_table
        scores = kernels.cluster_scores(query, *stored, self._sinks, ends, self._most(step))
        # Tokens of one cluster score the same, and the earlier ones of equals are taken first.
        return kernels.top_indices(scores, step.lengths, self.token_budget, 1, last=1)

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """The centroids and the clusters of all tokens in all sparse layers."""
        if step.max_length <= self.token_budget:
            return None
        layouts = [geometry.layers[i] for i in self.offloadable(geometry)]
        heads = sum(layout.num_kv_heads for layout in layouts)
        numbers = sum(layout.num_kv_heads * layout.key_dim for layout in layouts)
        count = self._count(step.prompts, step.lengths)
        read: Tensor = count * numbers + step.lengths * heads
        return read * geometry.itemsize

    def _form(self, step: Step, row: int, tokens: tuple[int, int], first: int) -> None:
        """Clusters some tokens of a sequence in all sparse layers; its `first` ones are there."""
        number = int(self._number(np.asarray(tokens[1] - tokens[0])))
        if not number:
            return
        pages = step.page_table[row].long()
        for layer, keys in enumerate(step.keys):
            data = step.page_data[layer]
            if "cluster" in data and layer not in self.full_layers:
                kernels.form_clusters(
                    keys, data["centroid"], data["cluster"], pages, tokens, (first, first + number)
                )

    def _crossing(self, step: Step) -> np.ndarray:
        """Sequences of which nothing is in clusters yet, bool [B]."""
        crossing: np.ndarray = step.fresh | (step.host_lengths == self.token_budget + 1)
        return crossing

    def _due(self, step: Step) -> np.ndarray:
        """Sequences of which tokens go into clusters, bool [B]."""
        known, prompts = step.host_lengths - 1, step.host_prompts
        made = self._ends(prompts, step.host_lengths)
        follows = (made == known) & (known > prompts)
        due: np.ndarray = (made > 0) & (self._crossing(step) | follows)
        return due

    def _most(self, step: Step) -> int:
        """The most clusters of any sequence, rounded up, so that many steps have shapes in common.

        What is too many is read and compared with nothing.
        """
        most = int(self._count(step.host_prompts, step.host_lengths).max())
        return -(-most // _ROUNDED) * _ROUNDED

    def _number(self, tokens: Any) -> Any:
        """Clusters for so many tokens. Arrays or tensors."""
        return (tokens // self.cluster_size).clip(1) * (tokens > 0)

    def _ends(self, prompts: Any, lengths: Any) -> Any:
        """Tokens from here on are in no cluster; 0 up to the budget. Arrays or tensors."""
        made = prompts + (lengths - 1 - prompts) // self._every * self._every
        return made * (lengths > self.token_budget)

    def _count(self, prompts: Any, lengths: Any) -> Any:
        """Clusters of sequences of `lengths` tokens, of which the newest is in none."""
        pieces = (lengths - 1 - prompts) // self._every
        each = int(self._number(np.asarray(self._every)))
        return self._number(prompts - self._sinks) + pieces * each

    @property
    def _sinks(self) -> int:
        assert self.sink_size is not None, "settled by resolve"
        return self.sink_size

    @property
    def _every(self) -> int:
        assert self.cluster_every is not None, "settled by resolve"
        return self.cluster_every

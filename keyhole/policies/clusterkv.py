"""ClusterKV: keys of similar direction form clusters, whatever their positions; a query reads the
clusters whose centroids score highest.

Liu et al., ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression, 2024
(arXiv 2412.03213). After the prompt, the keys of every KV head, except the first tokens, are
grouped into prompt length / `cluster_size` clusters by k-means with cosine similarity. Generated
keys form new clusters, `cluster_every` at a time, and are read in full until then. A centroid is
the mean of its keys; a cluster's score is the query's product with it. Clusters are read in order
of score until the budget is full; the last one is cut to its earliest tokens.

Cost per step and layer: a centroid per `cluster_size` tokens and the cluster of every token, then
`token_budget` keys and values; after the prompt, ten rounds of k-means.

When to use it: where the relevant tokens are scattered over the context: clusters of tokens are
selected, not pages. Keys are clustered after the prompt, which takes time.

Differences (theirs | ours | effect measured):
- every query head reads its own clusters | the query heads of a KV head share one selection, by
  the largest score among them; `share_group=False` is theirs | at a budget of 256: shared 4.2 %
  (1.2 to 14.0) with 1,186 KiB read per step, per query head 43.8 % (30.7 to 57.7) with 2,696 KiB
- generated tokens are read outside the budget until they are clustered; the evaluation code never
  clusters them | they count in the budget; `generated` accepts "recent_beside" and "all_beside" |
  at a budget of 256: counted as above, all outside it 64.6 % (50.4 to 76.6) with 1,763 KiB
- 16 first tokens are read outside the budget | they count in it | not measured: at the budgets here
  they are a sixteenth of it
- a cluster that does not fit into what is left of the budget is cut | the same: its earliest tokens
  are read | none
- k-means begins with random keys | with evenly spaced ones, so that clusters are reproducible | not
  measured: theirs differ from run to run
- 320 generated tokens make four clusters in the paper, eight in the code | four: one per
  `cluster_size` | not measured: the generated text here is shorter than two such groups
- the clusters of a prompt are its own | the same, so that a cached prefix is copied, not shared |
  none
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from keyhole import kernels
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import is_count, require, require_counts, require_layers_of, setting
from keyhole.policies import base
from keyhole.policies.base import Policy, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


# The number of centroids is rounded up to multiples of this.
_ROUNDED = 64
# Clusters of a prompt, at most. Beside keys of 16 bits the number of a token's cluster has 15 bits;
# half of these numbers are left for clusters of generated tokens.
_MOST_OF_PROMPT = 1 << 14

#: The handling of generated tokens, and which of them are read outside the budget.
_GENERATED = {
    "counted": "",
    "recent_beside": "generated tokens that are in no cluster yet",
    "all_beside": "all generated tokens",
}


@dataclass(frozen=True, kw_only=True)
class ClusterKV(Policy):
    """First and recent tokens, and the clusters of keys whose centroids score highest."""

    name: ClassVar[str] = "clusterkv"
    shares_pages: ClassVar[bool] = False
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = (
        "it clusters the keys of generated tokens, rejected ones as well"
    )
    page_settings: ClassVar[tuple[str, ...] | None] = ()  # every sequence computes its clusters
    token_budget: int = setting(1024, "tokens a step reads per KV head, sinks and recent included")
    full_layers: tuple[int, ...] = setting((0, 1), "layers that read everything")
    sink_size: int | None = setting(
        None, "first tokens that are always read; None: 16, or an eighth of a smaller budget"
    )
    window_size: int | None = setting(
        None, "newest tokens that are always read, in clusters too; None: the newest one"
    )
    cluster_size: int = setting(80, "tokens per cluster, on average")
    num_clusters: int | None = setting(
        None, "clusters of any prompt, one per token at most; None: by cluster_size"
    )
    cluster_every: int | None = setting(
        None, "generated tokens clustered at once; None: 320, or a third of a counting budget"
    )
    share_group: bool = setting(
        True, "the query heads of a KV head share one selection; False: one for each, as published"
    )
    generated: str = setting(
        "counted",
        "generated tokens: counted in the budget; recent_beside: read outside it until they are "
        "in clusters; all_beside: read outside it and never clustered",
    )

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves sinks and interval; checks that they fit into the budget."""
        budget = self.token_budget
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        require_counts(self, "token_budget", "cluster_size")
        good = self.num_clusters is None or is_count(self.num_clusters)
        require(good, "num_clusters", self.num_clusters, "at least 1")
        right = "one of " + ", ".join(_GENERATED)
        require(self.generated in _GENERATED, "generated", self.generated, right)
        sinks, every, window = self.sink_size, self.cluster_every, self.window_size
        sinks = min(16, budget // 8) if sinks is None else sinks
        if every is None:
            every = max(1, min(320, budget // 3)) if self._counts else 320
        require(is_count(sinks, 0), "sink_size", sinks, "at least 0")
        require(is_count(every), "cluster_every", every, "at least 1")
        right = "at least 1, or None for the newest alone"
        require(window is None or is_count(window), "window_size", window, right)
        # Unclustered tokens and the window are both newest tokens.
        waiting = every if self._counts else 1
        newest = "window_size" if (window or 1) > waiting else "cluster_every"
        least = sinks + max(waiting, window or 1)
        right = f"at least {least}: sink_size {sinks} and {newest} {least - sinks}"
        require(budget >= least, "token_budget", budget, right)
        return dataclasses.replace(self, sink_size=sinks, cluster_every=every)

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """All layers except the dense ones.

        ConfigError for a selection per query head, and if generated tokens are not counted.
        """
        base.require_shared_group(self.name, self.share_group)
        base.require_in_budget(self, "generated='counted'")
        return self._sparse_layers(geometry)

    @classmethod
    def as_published(cls, geometry: Geometry, token_budget: int) -> Self:
        """As in the authors' measurements of accuracy; as many clusters as in the paper."""
        sinks = min(16, token_budget - 1)
        return cls(
            token_budget=token_budget,
            sink_size=sinks,
            share_group=False,
            generated="all_beside",
        )

    def outside_budget(self) -> str:
        """The generated tokens that are read outside the budget."""
        return _GENERATED[self.generated]

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """The cluster of each token, and space for the centroids of the sequence.

        The number of clusters is at most the tokens over the smallest average cluster, plus one;
        the sequence's pages store the centroids in order.
        """
        smallest = min(self.cluster_size, self._every) if self.num_clusters is None else 1
        heads, slots = layout.num_kv_heads, -(-page_size // smallest)
        return {"centroid": (slots, heads, layout.key_dim), "cluster": (heads, page_size)}

    def before_step(self, step: Step) -> None:
        """Clusters the prompts of new sequences, and generated tokens once there are enough."""
        prompts, made = (
            step.sequences.host_prompts,
            self._ends(step.sequences.host_prompts, step.sequences.host_lengths),
        )
        crossing = self._crossing(step)
        for row in np.flatnonzero(self._due(step)).tolist():
            prompt, end = int(prompts[row]), int(made[row])
            of_prompt = int(self._of_prompt(np.asarray(prompt - self._sinks)))
            if crossing[row] and of_prompt:
                self._form(step, row, (self._sinks, prompt), (0, of_prompt))
            each = int(self._number(np.asarray(self._every)))
            first = prompt if crossing[row] else end - self._every
            for start in range(first, end, self._every):
                before = of_prompt + (start - prompt) // self._every * each
                self._form(step, row, (start, start + self._every), (before, before + each))

    def capture_key(self, step: Step) -> Hashable:
        """The number of centroids read, 0 for dense steps; None in steps that form clusters."""
        if self._due(step).any():
            return None
        if not self._selects(step):
            return 0
        return None if self.generated == "all_beside" else self._most(step)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The tokens of each KV head's best clusters, with the first and the recent ones."""
        if layer in self.full_layers or not self._selects(step):
            return None
        data = step.cache.page_data[layer]
        ends = self._ends(step.sequences.prompts, step.lengths)
        stored = query, data["centroid"], data["cluster"], step.page_table
        clusters = (*stored, self._sinks, ends, self._most(step))
        if self.share_group:
            scores = kernels.cluster_scores(*clusters)
        else:
            scores = kernels.cluster_scores_per_query_head(*clusters)
        # Tokens of one cluster have equal scores; ties go to the earlier token.
        among, last = self._among(step.sequences.prompts, step.lengths), self.window_size or 0
        if self._counts:
            return kernels.top_k(scores, among, self.token_budget, 1, last=max(1, last))
        chosen = kernels.top_k(scores, among, self.token_budget, 1, last=last)
        most = self._every
        if self.generated == "all_beside":
            most = int((step.sequences.host_lengths - step.sequences.host_prompts).max())
        return kernels.with_newer(chosen, among, step.lengths, most)

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """The centroids and the clusters of all tokens in all sparse layers."""
        if not self._selects(step):
            return None
        layouts = [geometry.layers[i] for i in self._sparse_layers(geometry)]
        heads = sum(layout.num_kv_heads for layout in layouts)
        numbers = sum(layout.num_kv_heads * layout.key_dim for layout in layouts)
        count = self._count(step.sequences.prompts, step.lengths)
        read: Tensor = count * numbers + step.lengths * heads
        return read * geometry.itemsize

    def _form(
        self, step: Step, row: int, tokens: tuple[int, int], numbers: tuple[int, int]
    ) -> None:
        """Assigns tokens (first, end) of a sequence to clusters (first, end), in sparse layers."""
        pages = step.page_table[row].long()
        for layer, keys in enumerate(step.cache.keys):
            data = step.cache.page_data[layer]
            if "cluster" in data and layer not in self.full_layers:
                kernels.form_clusters(
                    keys, data["centroid"], data["cluster"], pages, tokens, numbers
                )

    def _crossing(self, step: Step) -> np.ndarray:
        """Sequences that just exceeded the budget, bool [B]."""
        prompts, lengths = step.sequences.host_prompts, step.sequences.host_lengths
        before = self._long(prompts, lengths - 1) & ~step.sequences.fresh
        crossing: np.ndarray = self._long(prompts, lengths) & ~before
        return crossing

    def _due(self, step: Step) -> np.ndarray:
        """Sequences whose tokens are clustered in this step, bool [B]."""
        known, prompts = step.sequences.host_lengths - 1, step.sequences.host_prompts
        made = self._ends(prompts, step.sequences.host_lengths)
        follows = (made == known) & (known > prompts)
        due: np.ndarray = (made > 0) & (self._crossing(step) | follows)
        return due

    def _most(self, step: Step) -> int:
        """The most clusters of any sequence, rounded up, so that many steps have shapes in common.

        Excess centroids are read and ignored.
        """
        most = int(self._count(step.sequences.host_prompts, step.sequences.host_lengths).max())
        return -(-most // _ROUNDED) * _ROUNDED

    def _number(self, tokens: Any) -> Any:
        """Clusters for so many tokens. Arrays or tensors."""
        return (tokens // self.cluster_size).clip(1) * (tokens > 0)

    def _of_prompt(self, tokens: Any) -> Any:
        """Clusters for the tokens of a prompt after its first ones. Arrays or tensors."""
        if self.num_clusters is None:
            return self._number(tokens).clip(0, _MOST_OF_PROMPT)
        return tokens.clip(0, min(self.num_clusters, _MOST_OF_PROMPT))

    def _pieces(self, prompts: Any, lengths: Any) -> Any:
        """How often generated tokens were clustered, not counting the newest. Arrays or tensors."""
        if self.generated == "all_beside":
            return 0 * prompts
        return (lengths - 1 - prompts) // self._every

    def _among(self, prompts: Any, lengths: Any) -> Any:
        """The tokens that the budget covers: all, or those in clusters."""
        if self._counts:
            return lengths
        return prompts + self._pieces(prompts, lengths) * self._every

    def _long(self, prompts: Any, lengths: Any) -> Any:
        """Whether a sequence has more tokens than the budget. Arrays or tensors."""
        return self._among(prompts, lengths) > self.token_budget

    def _selects(self, step: Step) -> bool:
        """Whether some sequence of the step does not read everything."""
        return bool(self._long(step.sequences.host_prompts, step.sequences.host_lengths).any())

    def _ends(self, prompts: Any, lengths: Any) -> Any:
        """Tokens from here on are in no cluster; 0 up to the budget. Arrays or tensors."""
        made = prompts + self._pieces(prompts, lengths) * self._every
        return made * self._long(prompts, lengths)

    def _count(self, prompts: Any, lengths: Any) -> Any:
        """Clusters of sequences of `lengths` tokens; the newest token is in none."""
        each = int(self._number(np.asarray(self._every)))
        return self._of_prompt(prompts - self._sinks) + self._pieces(prompts, lengths) * each

    @property
    def _counts(self) -> bool:
        """Whether generated tokens count in the budget."""
        return self.generated == "counted"

    @property
    def _sinks(self) -> int:
        assert self.sink_size is not None, "settled by resolve"
        return self.sink_size

    @property
    def _every(self) -> int:
        assert self.cluster_every is not None, "settled by resolve"
        return self.cluster_every

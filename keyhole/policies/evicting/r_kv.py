"""R-KV: evicts generated tokens that are attended to little and resemble others.

Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models (2025, arXiv
2505.24133), section 3. A chain of thought repeats itself, and repeated tokens attract attention, so
that attention alone keeps copies. Whenever the buffer of new tokens is full, every token gets

    lambda * importance - (1 - lambda) * redundancy:

importance is the attention that it receives from the last `observation_window` queries (the largest
logit of a group of heads, softmax over the tokens before the window, mean over the window, largest
of `kernel_size` neighbours); redundancy is the softmax, over tokens, of the mean cosine of its key
with the others. Of the tokens similar to one (cosine above `threshold`), the newest is not counted,
so that one copy stays. The tokens of lowest score are evicted; the window stays.

Cost per step and layer: the prompt, and `token_budget` keys and values; once per page of new tokens
the cosines of all pairs of retained keys. Memory is bounded in the same way.

When to use it: for long derivations that repeat themselves, from short prompts, where memory must
stay bounded; evicted tokens are lost.

Differences (theirs | ours | effect measured):
- each layer and KV head evicts its own tokens | a page is one piece of memory for all layers and
  heads: the page of the lowest mean score over all of them is evicted | not measured:
  pages per layer do not exist here
- a buffer of 128 tokens outside the budget | the newest page, inside the budget | not measured: as
  above
- the prompt's tokens compete, too | the prompt stays, outside the budget or, with
  `prompt_in_budget`, inside it; scores are computed over the retained generated tokens, as if they
  were the cache | not measured
- lambda of 0.1 in the paper, 0.07 in the code | 0.1 | not measured
- every layer has keys of its own heads | with latents (MLA) the cosine is that of the latents |
  not measured
- every layer has full attention | layers with their own sliding window are unchanged | none
- open: soft-capped logits | importance is computed without the cap | not measured
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_count, is_number, require, setting
from keyhole.policies.base import Selection, SequenceData, Step, require_page
from keyhole.policies.evicting.base import (
    PageBudget,
    keep_newest,
    last_queries,
    query_state,
    require_kernel,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RKV(PageBudget):
    """The prompt, and generated pages that are attended to and unlike the others."""

    name: ClassVar[str] = "r_kv"
    reads_keys: ClassVar[bool] = True
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = (
        "it evicts pages by the queries of every token, rejected tokens as well"
    )
    observation_window: int | None = setting(
        None, "newest tokens that observe the others, and stay; None: 8, or a smaller page"
    )
    mix_lambda: float = setting(0.1, "weight of importance, from 0 to 1; the rest is redundancy's")
    kernel_size: int = setting(7, "neighbouring tokens whose importance is pooled, an odd number")
    threshold: float = setting(0.5, "cosine of keys above which two tokens are similar")

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves the window; checks that it fits into a page, and that weights are shares."""
        size, window = geometry.page_size, self.observation_window
        require_page(self.token_budget, size)
        window = min(8, size) if window is None else window
        right = f"from 1 to the page size {size}"
        require(is_count(window) and window <= size, "observation_window", window, right)
        good = is_number(self.mix_lambda) and 0 <= self.mix_lambda <= 1
        require(good, "mix_lambda", self.mix_lambda, "a number from 0 to 1")
        good = is_number(self.threshold) and -1 <= self.threshold <= 1
        require(good, "threshold", self.threshold, "a cosine, from -1 to 1")
        require_kernel(self.kernel_size)
        return dataclasses.replace(self, observation_window=window)

    def sequence_state(self, geometry: Geometry) -> dict[str, SequenceData]:
        """The last queries of every layer with full attention."""
        assert self.observation_window is not None, "settled by resolve"
        return query_state(geometry, geometry.full_attention, self.observation_window)

    def on_queries(self, layer: int, query: Tensor, step: Step, options: Mapping[str, Any]) -> None:
        """Keeps the newest tokens' queries."""
        keep_newest(layer, query, step, options)

    def capture_key(self, step: Step) -> Hashable:
        """None where a page is evicted: its scores are computed by the host's loop."""
        assert step.retained is not None
        return None if step.retained.due.any() else ()

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """All retained pages."""
        return None

    def after_step(self, step: Step) -> Tensor | None:
        """Evicts, of sequences that are due, the page whose tokens have the lowest mean score."""
        left = step.retained
        assert left is not None
        if not left.due.any():
            return None
        victims = left.pinned.new_zeros(len(left.due))
        for row in np.flatnonzero(left.due).tolist():
            victims[row] = self._victim(step, row)
        return victims

    def _victim(self, step: Step, row: int) -> Tensor | int:
        """The page to evict, counted after the pinned ones; the earlier of equals."""
        left = step.retained
        assert left is not None
        count = int((left.entries[row] >= 0).sum())
        pages = left.page_table[row, int(left.pinned[row]) : count].long()
        if len(pages) == 1:
            return 0
        length = int(step.sequences.host_lengths[row])
        total: Tensor | None = None
        names = [n for n in step.sequences.state if n.startswith("query ")]
        for layer in (int(name.split()[1]) for name in names):
            scores = kernels.redundancy_scores(
                last_queries(layer, step, row, length),
                step.cache.keys[layer],
                pages,
                kernel_size=self.kernel_size,
                mix_lambda=self.mix_lambda,
                threshold=self.threshold,
            )
            # The newest page holds the window, which stays.
            before = scores[:, : (len(pages) - 1) * step.page_size]
            by_page = before.unflatten(1, (-1, step.page_size)).mean((0, 2))
            total = by_page if total is None else total + by_page
        # Where every layer has a window of its own, no page is worth more than another.
        return 0 if total is None else total.argmin()

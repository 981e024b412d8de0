"""What evicting policies share: a budget of generated pages, and the last queries of each sequence.

When the budget is full, one page of a sequence is evicted from all layers. A page is one piece of
memory for all layers (docs/decisions/0002-one-page-table.md), so that no layer can be kept dense,
and a method that scores tokens per layer and head evicts the page whose tokens it values least over
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, setting
from keyhole.policies.base import Policy, SequenceData

if TYPE_CHECKING:
    from torch import Tensor

    from keyhole.policies.base import PromptQueries, Step


@dataclass(frozen=True, kw_only=True)
class PageBudget(Policy):
    """Keeps the prompt and `token_budget` generated tokens; a subclass names the page to evict."""

    token_budget: int = setting(1024, "tokens kept of what is generated, in whole pages")
    prompt_in_budget: bool = setting(False, "count the prompt in token_budget, too")

    def dense_layers(self, geometry: Geometry) -> tuple[int, ...]:
        """None: eviction removes a page from all layers at once, so that no layer stays dense."""
        return ()

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """None: every layer reads all retained pages."""
        return ()

    def outside_budget(self) -> str:
        """The prompt, unless it is counted."""
        return "" if self.prompt_in_budget else "the prompt"

    def page_limit(self, prompt_pages: np.ndarray, page_size: int) -> np.ndarray:
        """The prompt and the budget; one page more where a counted prompt fills the budget."""
        most: np.ndarray = prompt_pages + self.token_budget // page_size
        if self.prompt_in_budget:
            most = np.maximum(prompt_pages + 1, self.token_budget // page_size)
        return most

    def most_generated(self, page_size: int) -> int:
        """The most generated pages of a sequence."""
        return max(2, self.token_budget // page_size)


def query_state(
    geometry: Geometry, layers: tuple[int, ...], window: int
) -> dict[str, SequenceData]:
    """What is kept of a sequence, for `Policy.sequence_state`."""
    own = {i: geometry.layers[i] for i in layers}
    return {
        f"query {i}": SequenceData((window, layer.num_query_heads, layer.key_dim), like_keys=True)
        for i, layer in own.items()
    }


def require_kernel(kernel_size: int) -> None:
    """ConfigError for a pooling kernel without a middle."""
    odd = is_count(kernel_size) and kernel_size % 2 == 1
    require(odd, "kernel_size", kernel_size, "an odd number, at least 1")


def keep_prompt(layer: int, queries: PromptQueries, options: Mapping[str, Any]) -> None:
    """Keeps the last queries of a prompt's chunk, with attention's scale in them."""
    stored, count = queries.state[f"query {layer}"], len(queries.query)
    last = queries.query[-stored.shape[1] :]
    positions = queries.pages.new_ones(count).cumsum(0)[-len(last) :] + (queries.start - 1)
    slots = positions.new_full((len(last),), queries.slot)
    kernels.keep_queries(stored, slots, last * options["scale"], positions)
    places = queries.state[f"position {layer}"][queries.slot]
    places[positions % len(places)] = positions.to(places.dtype)


def prompt_queries(layer: int, step: Step, row: int, length: int) -> Tensor:
    """What `keep_prompt` kept of the last tokens of a sequence since the last call, as
    `last_queries`.

    Where a conversation goes on, its last answer was decoded, and these places hold older queries.
    """
    query, slot = last_queries(layer, step, row, length), step.sequences.slots[row]
    places = step.sequences.state[f"position {layer}"][slot]
    expected = places.new_ones(len(query)).cumsum(0) + (length - len(query) - 1)
    count = int((places[expected % len(places)] == expected).sum())
    step.sequences.state[f"position {layer}"][slot] = -1
    return query[-count:]


def keep_newest(layer: int, query: Tensor, step: Step, options: Mapping[str, Any]) -> None:
    """The same for the newest tokens of decoding sequences, [B, Hq, D]."""
    stored, positions = step.sequences.state[f"query {layer}"], step.lengths.long() - 1
    kernels.keep_queries(stored, step.sequences.slots, query * options["scale"], positions)


def last_queries(layer: int, step: Step, row: int, length: int) -> Tensor:
    """The last queries of a sequence of `length` tokens, oldest first, [W, Hq, D], scaled."""
    stored = step.sequences.state[f"query {layer}"]
    return kernels.last_queries(stored, step.sequences.slots[row], length)

"""The last queries of each sequence, in its state: what policies observe that evict by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require

if TYPE_CHECKING:
    from torch import Tensor

    from keyhole.policies.base import PromptQueries, Step


def query_state(
    geometry: Geometry, layers: tuple[int, ...], window: int
) -> dict[str, tuple[int, ...]]:
    """Name and shape of the state, for `Policy.sequence_numbers`."""
    heads = geometry.num_query_heads
    return {f"query {i}": (window, heads, geometry.layers[i].key_dim) for i in layers}


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


def keep_newest(layer: int, query: Tensor, step: Step, options: Mapping[str, Any]) -> None:
    """The same for the newest tokens of decoding sequences, [B, Hq, D]."""
    stored, positions = step.sequences.state[f"query {layer}"], step.lengths.long() - 1
    kernels.keep_queries(stored, step.sequences.slots, query * options["scale"], positions)


def last_queries(layer: int, step: Step, row: int, length: int) -> Tensor:
    """The last queries of a sequence of `length` tokens, oldest first, [W, Hq, D], scaled."""
    stored = step.sequences.state[f"query {layer}"]
    return kernels.last_queries(stored, step.sequences.slots[row], length)

"""Calls a policy's hooks for the layers of a step that vLLM runs.

Policies have no state, so the adapter holds the side data of each page. It is indexed by vLLM's
physical block, so cached prefixes and reordered requests keep it. Only the classes of
`keyhole.policies` decide what a step reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.integrations.vllm.counters import ReadCounters
from keyhole.integrations.vllm.page_policy import page_data_shapes
from keyhole.integrations.vllm.step_rows import StepRows, Tables, tables_of
from keyhole.policies.base import Policy, ScoreRequest, Selection, Step

#: Combines the scores of all tensor-parallel ranks, in place: scores and "max" or "sum".
Reduce = Callable[[Tensor, str], None]


@dataclass
class Shared:
    """What the layers of one step share, even across KV cache groups, because page numbers are
    logical.
    """

    selection: Selection | None = None
    tables: dict[tuple[int, int], Tables] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerInput:
    """One layer's queries and pages.

    query: [B, Hq, D] of the rows. keys, values: [P, Hkv, page_size, D], views of vLLM's cache.
    options: scale, softcap and sinks, as in `kernels.attend`.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    options: dict[str, Any]


class Adapter:
    """One model's policy on one rank.

    policy: from `page_policy`. reduce: None with a single rank, or if each rank selects on its own.
    """

    def __init__(
        self,
        policy: Policy,
        geometry: Geometry,
        counters: ReadCounters,
        reduce: Reduce | None = None,
    ) -> None:
        self.policy, self.geometry, self.counters = policy, geometry, counters
        self._reduce = reduce
        self._keys: list[Tensor] = [torch.empty(0)] * geometry.num_layers
        self._data: list[dict[str, Tensor]] = [{}] * geometry.num_layers
        self._shapes = [
            page_data_shapes(policy, layout, geometry.page_size) for layout in geometry.layers
        ]
        self.sparse = tuple(
            i for i in geometry.full_attention if i not in policy.dense_layers(geometry)
        )

    @property
    def reads_keys(self) -> bool:
        """Whether hooks read keys, so that their layout in vLLM's pages must be known."""
        scores = type(self.policy).needs_scores is not Policy.needs_scores
        return scores or any(self._shapes)

    def written(self, layer: int, keys: Tensor, rows: StepRows) -> None:
        """Updates the side data of the pages that the step wrote."""
        shapes = self._shapes[layer]
        self._keys[layer] = keys
        if not shapes:
            return
        data = self._data[layer]
        if not data or next(iter(data.values())).shape[0] != keys.shape[0]:
            self._data[layer] = data = {
                name: keys.new_zeros(keys.shape[0], *shape) for name, shape in shapes.items()
            }
        self.policy.on_append(keys, data, *rows.written)

    def select(
        self, layer: int, rows: StepRows, shared: Shared, given: LayerInput
    ) -> Tables | None:
        """What the rows read in this full-attention layer; None: everything."""
        step = rows.begin(self._keys, self._data)
        step.shared_selection = shared.selection
        requests = self.policy.needs_scores(layer, step)
        if requests:
            chosen = self.policy.on_scores(layer, self._scores(requests, step, given), step)
        else:
            chosen = self.policy.select(layer, given.query, step)
        shared.selection = step.shared_selection
        tables = None if chosen is None else self._tables(chosen, step, shared, layer)
        self.counters.count(step, tables)
        return tables

    def _tables(self, chosen: Selection, step: Step, shared: Shared, layer: int) -> Tables:
        """The tables of a selection, shared by layers with the same selection and page table."""
        key = id(chosen), id(step)
        if chosen is not shared.selection:
            return tables_of(chosen, step, self.geometry.layers[layer].num_kv_heads)
        if key not in shared.tables:
            heads = self.geometry.layers[layer].num_kv_heads
            shared.tables[key] = tables_of(chosen, step, heads)
        return shared.tables[key]

    def _scores(
        self, requests: tuple[ScoreRequest, ...], step: Step, given: LayerInput
    ) -> tuple[Tensor, ...]:
        """The requested attention weights of this layer, over the heads of all ranks."""
        if self._reduce is None:
            return self._own_scores(requests, step, given)
        # Heads are reduced token by token, before the tokens of a page are summed.
        by_token = tuple(ScoreRequest(request.reduce, 1) for request in requests)
        found = []
        for request, score in zip(requests, self._own_scores(by_token, step, given), strict=True):
            if request.reduce in ("max", "sum"):
                self._reduce(score, request.reduce)
            found.append(score.unflatten(2, (-1, request.unit)).sum(3))
        return tuple(found)

    @staticmethod
    def _own_scores(
        requests: tuple[ScoreRequest, ...], step: Step, given: LayerInput
    ) -> tuple[Tensor, ...]:
        options = given.options
        paged = (step.page_table, step.lengths)
        plain = options["softcap"] is None and options["sinks"] is None
        if plain and all(request.reduce in ("max", "group_max") for request in requests):
            # Without the values: vLLM's own attention computes the output.
            weights = kernels.head_scores(given.query, given.keys, *paged, scale=options["scale"])
            return tuple(
                (weights if request.reduce == "group_max" else weights.amax(1, keepdim=True))
                .unflatten(2, (-1, request.unit))
                .sum(3)
                for request in requests
            )
        whole = kernels.PagedQuery(given.query, given.keys, given.values, *paged)
        _, scores = kernels.attend_and_score(whole, requests=requests, **options)
        return scores

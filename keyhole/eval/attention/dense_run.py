"""Feeds texts through decode steps of the dense model and records what policies would read.

In every layer with full attention, each policy of `Candidates` selects by the layer's own queries,
and attention over its selection is computed by the code of decode steps. The model itself continues
with the output of full attention, so a policy's loss in one layer does not change the layers after
it.

Each measure below takes one decode step of B sequences and returns float64 [B].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from keyhole import kernels
from keyhole.cache.kept_tokens import RetainedPages
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import EngineConfig
from keyhole.engine.engine import Engine
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache
from keyhole.eval.forced_text import SampleRows
from keyhole.eval.workload import Request, serve
from keyhole.kernels.reference import members
from keyhole.models import attention
from keyhole.models.batch import Batch
from keyhole.models.model import Model
from keyhole.policies.base import (
    Policy,
    PromptQueries,
    ScoreRequest,
    Selection,
    SequenceData,
    Step,
)
from keyhole.retrieval.gate import SeerGate
from keyhole.retrieval.head import RetrievalHead


def mass_kept(weights: Tensor, tokens: Tensor) -> Tensor:
    """Share of the attention weights on the tokens that are read, mean over query heads.

    weights: float32 [B, Hq, N], 0 past the sequence. tokens: bool [B, H, N]; H divides Hq.
    """
    kept = (weights * _per_query_head(tokens, weights)).sum(2)
    shares: Tensor = kept.double() / weights.sum(2).double()
    return shares.mean(1)


def output_error(full: Tensor, found: Tensor) -> Tensor:
    """||found - full|| / ||full|| over all heads of a layer, [B, Hq, Dv] each."""
    full, found = full.double().flatten(1), found.double().flatten(1)
    error: Tensor = (found - full).norm(dim=1) / full.norm(dim=1)
    return error


def tokens_read(tokens: Tensor, num_kv_heads: int) -> Tensor:
    """Tokens read per KV head, mean over KV heads. A token that several query heads of one KV head
    read counts once.

    tokens: bool [B, H, N].
    """
    lists = tokens.shape[1]
    if lists > num_kv_heads:
        tokens = tokens.unflatten(1, (num_kv_heads, -1)).any(2)
    return tokens.sum(2).double().mean(1)


def found_again(wanted: Tensor, among: Tensor) -> Tensor:
    """Share of the wanted entries that are found, mean over lists; bool [..., H, N] each, [...]."""
    shares: Tensor = (wanted & among).sum(-1).double() / wanted.sum(-1)
    return shares.mean(-1)


def page_sums(scores: Tensor, page_size: int) -> Tensor:
    """Scores of tokens [B, H, N] summed over pages, [B, H, N / page_size]."""
    sums: Tensor = scores.unflatten(2, (-1, page_size)).sum(3)
    return sums


def _per_query_head(tokens: Tensor, weights: Tensor) -> Tensor:
    return tokens.repeat_interleave(weights.shape[1] // tokens.shape[1], 1)


class Retained:
    """The generated pages that remain of each sequence, by its slot."""

    def __init__(self, policy: Policy, page_size: int) -> None:
        self._policy = policy
        self._size = page_size
        self._pinned: dict[int, int] = {}
        self._limit: dict[int, int] = {}
        self._generated: dict[int, list[int]] = {}

    def view(self, step: Step) -> RetainedPages:
        """The remaining pages at this step, after adding the pages that its newest tokens begin."""
        slots, size = step.sequences.slots.tolist(), self._size
        position = np.asarray(step.sequences.host_lengths) - 1
        for slot, place, fresh in zip(
            slots, position.tolist(), step.sequences.fresh.tolist(), strict=True
        ):
            if fresh:
                self._enter(slot, place)
            generated, newest = self._generated[slot], place // size
            if newest >= self._pinned[slot] and generated[-1:] != [newest]:
                generated.append(newest)
        rows = [[*range(self._pinned[slot]), *self._generated[slot]] for slot in slots]
        counts = np.asarray([len(row) for row in rows])
        entries = np.full((len(rows), counts.max()), -1, np.int64)
        for row, kept in zip(entries, rows, strict=True):
            row[: len(kept)] = kept
        most = max(len(self._generated[slot]) for slot in slots)
        limits = np.asarray([self._limit[slot] for slot in slots])
        gives_up = np.asarray([bool(self._generated[slot]) for slot in slots])
        due = ((position + 1) % size == 0) & (counts >= limits) & gives_up
        device = step.lengths.device
        listed = torch.from_numpy(entries).to(device)
        table = step.page_table.gather(1, listed.clamp(min=0)).masked_fill(listed < 0, 0)
        lengths = counts * size - (size - 1 - position % size)
        return RetainedPages(
            page_table=table,
            pages=torch.from_numpy(counts.astype(np.int32)).to(device),
            lengths=torch.from_numpy(lengths.astype(np.int32)).to(device),
            pinned=torch.tensor([self._pinned[slot] for slot in slots], device=device),
            goes=torch.from_numpy(due).to(device),
            entries=entries,
            most_generated=most,
            due=due,
        )

    def evict(self, step: Step, victims: Tensor) -> None:
        """Removes the page that each sequence evicts; victims: int64 [B], as `after_step` returns
        them.
        """
        assert step.retained is not None
        for row, slot in enumerate(step.sequences.slots.tolist()):
            if step.retained.due[row]:
                del self._generated[slot][int(victims[row])]

    def _enter(self, slot: int, position: int) -> None:
        pinned = -(-position // self._size)
        limit = self._policy.page_limit(np.asarray([pinned]), self._size)
        assert limit is not None
        self._pinned[slot], self._limit[slot] = pinned, int(limit[0])
        self._generated[slot] = []


#: Called for every full-attention layer of a decode step, with its number and queries [B, Hq, D].
LayerObserver = Callable[[int, Tensor, Step], None]


@dataclass(eq=False)
class StepView:
    """Each policy's view of the current step. retained: the remaining pages, for policies that
    evict.
    """

    steps: list[Step] = field(default_factory=list)
    retained: dict[int, Retained] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Candidates(Policy):
    """Full attention, with `policies` that observe it; `progress` holds their views of the step.

    observe: called by every full-attention layer of a decode step, before its attention.
    """

    name: ClassVar[str] = "candidates"
    dense: ClassVar[bool] = True
    capturable: ClassVar[bool | str] = "its policies are called by the host, in every step"

    policies: tuple[Policy, ...] = ()
    observe: LayerObserver | None = None
    progress: StepView = field(default_factory=StepView)

    def __post_init__(self) -> None:
        # Other policies have these as class variables; here they depend on the wrapped policies.
        for name in ("wants_head", "wants_gate", "shifts_keys", "reads_keys", "reads_queries"):
            object.__setattr__(self, name, any(getattr(one, name) for one in self.policies))
        shares = all(one.shares_pages for one in self.policies)
        object.__setattr__(self, "shares_pages", shares)

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves the policies; finds those that evict."""
        settled = tuple(one.resolve(geometry) for one in self.policies)
        retained = {
            number: Retained(one, geometry.page_size)
            for number, one in enumerate(settled)
            if one.page_limit(np.ones(1, np.int64), geometry.page_size) is not None
        }
        return dataclasses.replace(self, policies=settled, progress=StepView(retained=retained))

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """The entries of all policies."""
        return _joined([one.page_data(layout, page_size) for one in self.policies])

    def sequence_state(self, geometry: Geometry) -> dict[str, SequenceData]:
        """The entries of all policies."""
        return _joined([one.sequence_state(geometry) for one in self.policies])

    def on_append(
        self, key_pages: Tensor, data: Mapping[str, Tensor], pages: Tensor, filled: Tensor
    ) -> None:
        """Updates the side data of every policy."""
        for number, one in enumerate(self.policies):
            own = _own(number, data)
            if own:
                one.on_append(key_pages, own, pages, filled)

    def reusable(self, known: int, page_size: int) -> int:
        """The longest prefix that all of them can reuse."""
        return min([known, *(one.reusable(known, page_size) for one in self.policies)])

    def on_prompt_queries(
        self, layer: int, queries: PromptQueries, options: Mapping[str, Any]
    ) -> None:
        """Passes the queries to every policy that reads them."""
        for number, one in enumerate(self.policies):
            if one.reads_queries:
                own = dataclasses.replace(
                    queries,
                    data=_own(number, queries.data),
                    state=_own(number, queries.state),
                )
                one.on_prompt_queries(layer, own, options)

    def on_queries(self, layer: int, query: Tensor, step: Step, options: Mapping[str, Any]) -> None:
        """Passes the queries to every policy that reads them, each with its own step."""
        for one, own in zip(self.policies, self.progress.steps, strict=True):
            if one.reads_queries:
                one.on_queries(layer, query, own, options)

    def before_step(self, step: Step) -> None:
        """Makes a step for each policy, and lets each select before the first layer."""
        retained = self.progress.retained
        self.progress.steps = [
            dataclasses.replace(
                step,
                sequences=dataclasses.replace(
                    step.sequences, state=_own(number, step.sequences.state)
                ),
                cache=dataclasses.replace(
                    step.cache, page_data=[_own(number, data) for data in step.cache.page_data]
                ),
                retained=retained[number].view(step) if number in retained else None,
            )
            for number in range(len(self.policies))
        ]
        for one, own in zip(self.policies, self.progress.steps, strict=True):
            one.before_step(own)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """Selects everything, after calling `observe`."""
        if self.observe is not None:
            self.observe(layer, query, step)
        return None

    def after_step(self, step: Step) -> Tensor | None:
        """Records the pages that each evicting policy evicts; the cache keeps them."""
        for number, (one, own) in enumerate(zip(self.policies, self.progress.steps, strict=True)):
            victims = one.after_step(own)
            if victims is not None:
                self.progress.retained[number].evict(own, victims)
        return None


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        f"{number} {name}": shape
        for number, part in enumerate(parts)
        for name, shape in part.items()
    }


def _own(number: int, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{number} "
    return {name[len(start) :]: x for name, x in named.items() if name.startswith(start)}


@dataclass(frozen=True, eq=False)
class Reading:
    """What a policy would read of each sequence in a layer, and the attention output over it.

    tokens: bool [B, H, N], with H = 1, Hkv or Hq; None: everything. output: [B, Hq, Dv].
    """

    tokens: Tensor | None
    output: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerStep:
    """One layer of one decode step under full attention.

    samples: int64 [B], the text of each row. weights: float32 [B, Hq, N], 0 past the sequence.
    output: [B, Hq, Dv]. readings: one for each policy. step: as the dense model sees it.
    """

    layer: int
    samples: Tensor
    num_kv_heads: int
    weights: Tensor
    output: Tensor
    readings: tuple[Reading, ...]
    step: Step


Take = Callable[[LayerStep], None]


#: Called with the batch, the layer's number, its queries and the options of its attention.
Observer = Callable[[Batch, int, Tensor, dict[str, Any]], None]


@dataclass
class ObservedModel(Model):
    """A model that calls `observe` in every layer, before its attention."""

    observe: Observer | None = None

    @classmethod
    def of(cls, model: Model, observe: Observer) -> Self:
        """The same model, observed."""
        own = {one.name: getattr(model, one.name) for one in dataclasses.fields(Model) if one.init}
        return cls(**own, observe=observe)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """See `Model`."""
        assert self.observe is not None
        batch.observer = functools.partial(self.observe, batch)
        return super().forward(token_ids, positions, batch, rows)


def run(
    model: Model,
    policies: Sequence[Policy],
    requests: Sequence[Request],
    config: EngineConfig,
    take: Take,
    *,
    copies: SharedPromptCache | None = None,
    head: RetrievalHead | None = None,
    gate: SeerGate | None = None,
) -> None:
    """Runs the requests on the dense model and calls `take` with every full-attention layer of each
    step.

    Samples are numbered in the order of the requests. copies: cached prompts. head, gate: for
    policies that need one; None: those stored with the weights.
    """
    rows = SampleRows()
    seen: list[Any] = []

    def observe(batch: Batch, layer: int, query: Tensor, options: dict[str, Any]) -> None:
        seen[:] = batch, {name: value for name, value in options.items() if name != "window"}

    def look_at(layer: int, query: Tensor, step: Step) -> None:
        batch, options = seen
        take(_layer_step(model, batch, layer, query, options, rows))

    candidates = Candidates(policies=tuple(policies), observe=look_at)
    observed = ObservedModel.of(model, observe)
    engine = Engine(observed, candidates, config, head=head, copies=copies, gate=gate)
    try:
        serve(engine, requests, rows.update)
    finally:
        model.unwatch()


def _layer_step(
    model: Model, batch: Batch, layer: int, query: Tensor, options: dict[str, Any], rows: SampleRows
) -> LayerStep:
    step, candidates, cache = batch.step, batch.policy, batch.cache
    assert step is not None
    assert isinstance(candidates, Candidates)
    geometry = cache.geometry
    pages = (cache.keys[layer], cache.values[layer])
    paged = kernels.PagedQuery(query, *pages, step.page_table, step.lengths)
    output, (weights,) = kernels.attend_and_score(
        paged, requests=(ScoreRequest("none", 1),), **options
    )

    readings = []
    for policy, own in zip(candidates.policies, candidates.progress.steps, strict=True):
        reads: list[Selection | None] = []
        alone = dataclasses.replace(
            batch, policy=policy, step=own, reads=reads, prefetcher=None, observer=None
        )
        # The newest key and value are in the cache; only buffers of offloaded layers need them.
        found = attention.decode(alone, layer, query, (query, None), None, options)
        output_there = expanded(model, geometry, layer, found)
        readings.append(Reading(_tokens(reads[-1], own, weights.shape[2]), output_there))
    samples = torch.tensor([sample for sample, _ in rows.keys(step)], device=query.device)
    return LayerStep(
        layer=layer,
        samples=samples,
        num_kv_heads=geometry.layers[layer].num_kv_heads,
        weights=weights,
        output=expanded(model, geometry, layer, output),
        readings=tuple(readings),
        step=step,
    )


def expanded(model: Model, geometry: Geometry, layer: int, output: Tensor) -> Tensor:
    """A layer's output; for MLA, the values of each head computed from the shared latents."""
    if not geometry.layers[layer].shared_values:
        return output
    return attention.expand(model.network.base_model.layers[layer].self_attn, output)


def _tokens(selection: Selection | None, step: Step, count: int) -> Tensor | None:
    """Which of `count` tokens of each sequence a selection reads, bool [B, H, count].

    None: everything. Under a policy that evicts, a selection counts only the remaining pages.
    """
    left, size = step.retained, step.page_size
    if left is None and selection is None:
        return None
    if selection is None:
        assert left is not None
        listed, unit = torch.from_numpy(left.entries).to(step.lengths.device)[:, None], size
    else:
        listed, unit = selection.indices.long(), selection.unit
        if left is not None:
            entries = torch.from_numpy(left.entries).to(listed.device)[:, None]
            entries = entries.expand(-1, listed.shape[1], -1)
            per_page = size // unit
            place = listed.clamp(min=0)
            pages = entries.gather(2, place // per_page)
            listed = (pages * per_page + place % per_page).where(listed >= 0, -1)
    chosen = members(listed, -(-count // unit))
    tokens = chosen.repeat_interleave(unit, 2)[..., :count]
    there = torch.arange(count, device=tokens.device) < step.lengths[:, None]
    return tokens & there[:, None]

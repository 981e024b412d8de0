"""Forces texts through decode steps of the dense model and shows what policies would read.

In every layer with full attention the policies of `Candidates` are asked, by the layer's own
queries, and attention over what each would read is computed by the code that decode steps run. The
model itself goes on with the output of full attention.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import EngineConfig
from keyhole.engine.engine import Engine
from keyhole.engine.shared_prompt_cache import SharedPromptCache
from keyhole.eval.attention import measures
from keyhole.eval.attention.candidates import Candidates
from keyhole.eval.workloads.attention_recall import SampleRows
from keyhole.eval.workloads.generation import Request, serve
from keyhole.models import attention
from keyhole.models.batch import Batch
from keyhole.models.loading import Model
from keyhole.policies.base import Policy, ScoreRequest, Selection, Step
from keyhole.retrieval.head import RetrievalHead


@dataclass(frozen=True, eq=False)
class Reading:
    """What a policy would read of each sequence in a layer, and attention over it.

    tokens: bool [B, H, N], H being 1, Hkv or Hq; None: everything. output: [B, Hq, Dv].
    """

    tokens: Tensor | None
    output: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerStep:
    """One layer of one decode step under full attention.

    samples: int64 [B], which text each row is. weights: float32 [B, Hq, N], 0 past the sequence.
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


@dataclass
class _Options:
    """Of the layer that runs: its batch, and how attention is computed there."""

    batch: Batch | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def observe(self, batch: Batch, layer: int, query: Tensor, options: dict[str, Any]) -> None:
        """Called by every layer before its attention."""
        self.batch = batch
        self.options = {name: value for name, value in options.items() if name != "window"}


@dataclass
class ObservedModel(Model):
    """A model whose layers tell `seen` how they compute attention."""

    seen: _Options = field(default_factory=_Options)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """As of `Model`."""
        batch.observer = functools.partial(self.seen.observe, batch)
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
) -> None:
    """Serves the requests by the dense model; `take` gets every full-attention layer of each step.

    Samples are numbered in the order of the requests. copies: prompts that are known already.
    head: for policies that want one; None: that beside the weights.
    """
    rows = SampleRows()
    fields = {one.name: getattr(model, one.name) for one in dataclasses.fields(Model)}
    observed = ObservedModel(**fields)

    def look(layer: int, query: Tensor, step: Step) -> None:
        assert observed.seen.batch is not None
        take(_layer_step(model, observed.seen.batch, layer, query, observed.seen.options, rows))

    candidates = Candidates(policies=tuple(policies), look=look)
    engine = Engine(observed, candidates, config, head=head, copies=copies)
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
    paged = (query, cache.keys[layer], cache.values[layer], step.page_table, step.lengths)
    output, (weights,) = kernels.attend_and_score(
        *paged, requests=(ScoreRequest("none", 1),), **options
    )

    readings = []
    for policy, own in zip(candidates.policies, candidates.progress.steps, strict=True):
        reads: list[Selection | None] = []
        alone = dataclasses.replace(
            batch, policy=policy, step=own, reads=reads, prefetcher=None, observer=None
        )
        # The newest key and value are in the cache; only buffers of offloaded layers want them.
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
    """A layer's output; of MLA, values of each head from latents that all heads share."""
    if not geometry.layers[layer].shared_values:
        return output
    return attention.expand(model.network.base_model.layers[layer].self_attn, output)


def _tokens(selection: Selection | None, step: Step, count: int) -> Tensor | None:
    """Which of `count` tokens of each sequence a selection reads, bool [B, H, count].

    None: everything. Under a policy that evicts, a selection counts only the pages that are left.
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
    chosen = measures.members(listed, -(-count // unit))
    tokens = chosen.repeat_interleave(unit, 2)[..., :count]
    there = torch.arange(count, device=tokens.device) < step.lengths[:, None]
    return tokens & there[:, None]

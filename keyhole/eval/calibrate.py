"""Measurements of `keyhole calibrate`: layers for DELTA, and stable layers for SamKV.

DELTA: the model runs densely. At each decode step every full-attention layer selects pages as DELTA
would, and each later layer is evaluated on the selections of all layers before it, so that one run
measures every possible placement:

    recall[a, b]   mean share of layer b's attention on the pages that layer a selects
    error[a, b]    mean of ||sparse - full|| / ||full||: layer b's attention output over the pages
                   that layer a selects against that over all pages, all heads together
    shift[b]       mean total variation between the page distributions of layer b and of the
                   full-attention layer before it: half the sum of |differences|, from 0 to 1

`keyhole.policies.selection_layers` derives a placement from any of them. Only steps with more than
`token_budget` tokens count, because DELTA selects nothing in shorter ones. The layers before b are
dense, so each error is that of one layer alone.

SamKV (arXiv 2508.11661, appendix A.2): calibration documents are encoded, and the layers whose
statistics agree are selected; `keyhole.reuse.block_scores` defines the statistics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import EngineConfig, SamplingParams, is_count, require
from keyhole.documents.source import BLOCK_SIZE
from keyhole.engine.documents.encoder import encode
from keyhole.errors import ConfigError
from keyhole.eval.attention import dense_run
from keyhole.eval.attention.dense_run import expanded
from keyhole.kernels.reference import members
from keyhole.llm import LLM
from keyhole.models.batch import Batch
from keyhole.models.model import Model
from keyhole.policies.base import ScoreRequest, Selection, Step
from keyhole.policies.controls import Full
from keyhole.policies.delta import Delta
from keyhole.policies.selection_layers import (
    Calibration,
    place_by_error,
    place_by_recall,
    place_by_shift,
)
from keyhole.reuse.sam_kv import NUM_STABLE, Stability, require_measurable, stable_layers
from keyhole.tokenization import Prompt, encode_text, given_ids

Method = Literal["optimal", "paper"]
Measure = Literal["mass", "error"]


class Role(NamedTuple):
    """What a layer reads: its own window, everything, everything with a selection for later layers,
    or an earlier layer's selection.

    chooser: the layer whose pages a sparse layer reads.
    """

    kind: Literal["window", "full", "selects", "sparse"]
    chooser: int | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of a dense run: recall and error [L][L] and shift [L], see the module docstring.

    `layers` are those with full attention; entries of other layers are 0. steps: decode steps
    counted. sparse_share: mean share of a sequence's tokens that a sparse layer reads.
    """

    model: str
    layers: tuple[int, ...]
    token_budget: int
    recall: list[list[float]]
    error: list[list[float]]
    shift: list[float]
    steps: int
    sparse_share: float

    def place(
        self,
        method: Method,
        num_delta_layers: int,
        full_layers: Sequence[int],
        measure: Measure = "mass",
    ) -> Calibration:
        """Selects the delta layers by "optimal" or "paper", with the expected recall and error of
        each layer.

        measure: the loss that "optimal" minimises. ConfigError if no sparse layer would remain.
        """
        candidates = candidates_of(self.layers, num_delta_layers, full_layers)
        if method == "paper":
            delta = place_by_shift(self.shift, candidates, num_delta_layers)
        elif measure == "error":
            delta = place_by_error(self.error, candidates, num_delta_layers)
        else:
            delta = place_by_recall(self.recall, candidates, num_delta_layers)
        return self.expected(full_layers, delta, method, "shift" if method == "paper" else measure)

    def expected(
        self, full_layers: Sequence[int], delta_layers: Sequence[int], method: str, measure: str
    ) -> Calibration:
        """The expected recall and error of each layer with these layers."""
        # A layer that reads everything has no loss.
        choosers = [role.chooser for role in self.roles(full_layers, delta_layers)]
        pairs = list(enumerate(choosers))
        recall = [1.0 if a is None else self.recall[a][b] for b, a in pairs]
        error = [0.0 if a is None else self.error[a][b] for b, a in pairs]
        return Calibration(
            model=self.model,
            method=method,
            num_layers=len(self.recall),
            token_budget=self.token_budget,
            full_layers=tuple(sorted(full_layers)),
            delta_layers=tuple(delta_layers),
            recall=tuple(round(value, 4) for value in recall),
            measure=measure,
            error=tuple(round(value, 4) for value in error),
        )

    def cost(self, placed: Calibration) -> Cost:
        """The cost of a placement: means over its sparse layers, and keys read."""
        roles = self.roles(placed.full_layers, placed.delta_layers)
        sparse = [layer for layer, role in enumerate(roles) if role.kind == "sparse"]
        dense = [layer for layer in self.layers if layer not in sparse]
        return Cost(
            dense_layers=tuple(dense),
            recall=sum(placed.recall[i] for i in sparse) / len(sparse) if sparse else 1.0,
            error=sum(placed.error[i] for i in sparse) / len(sparse) if sparse else 0.0,
            keys_read=(len(dense) + len(sparse) * self.sparse_share) / len(self.layers),
        )

    def roles(self, full_layers: Sequence[int], delta_layers: Sequence[int]) -> list[Role]:
        """What each layer does under DELTA with these layers."""
        roles = []
        for layer in range(len(self.recall)):
            before = [chosen for chosen in delta_layers if chosen < layer]
            if layer not in self.layers:
                roles.append(Role("window"))
            elif layer in delta_layers:
                roles.append(Role("selects"))
            elif layer in full_layers or not before:
                roles.append(Role("full"))
            else:
                roles.append(Role("sparse", max(before)))
        return roles


class Cost(NamedTuple):
    """The cost of a placement: layers that read everything, and means over the others.

    recall, error: of a sparse layer. keys_read: share of the keys of all full-attention layers that
    a step reads.
    """

    dense_layers: tuple[int, ...]
    recall: float
    error: float
    keys_read: float


def candidates_of(
    layers: Sequence[int], num_delta_layers: int, full_layers: Sequence[int]
) -> list[int]:
    """The layers that may select; ConfigError if no sparse layer would remain."""
    candidates = [layer for layer in layers if layer not in full_layers]
    right = (
        f"without at least two of the {len(layers)} full-attention layers: one that selects, and "
        "one that uses its selection"
    )
    require(len(candidates) > 1, "full_layers", tuple(full_layers), right)
    require(
        is_count(num_delta_layers) and num_delta_layers < len(candidates),
        "num_delta_layers",
        num_delta_layers,
        f"at least 1, and fewer than the {len(candidates)} full-attention layers that are not in "
        "full_layers, so that at least one layer is left to use a selection",
    )
    return candidates


def measured(
    model: Model,
    prompts: list[Prompt],
    *,
    token_budget: int = Delta.token_budget,
    recent_pages: int | None = None,
    max_tokens: int = 64,
    page_size: int = EngineConfig.page_size,
) -> Measurement:
    """Runs prompts, each continued greedily by up to `max_tokens`, and measures every step.

    Raises ConfigError if no step was longer than `token_budget`.
    """
    delta = Delta(token_budget=token_budget, recent_pages=recent_pages, delta_layers=())
    geometry = model.geometry(page_size)
    sums = _Sums(delta.resolve(geometry), geometry)
    observed = dense_run.ObservedModel.of(model, functools.partial(_observe, model, sums))
    llm = LLM(observed, policy=_Watched(), page_size=page_size)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    longest = 0
    for result in llm.generate(prompts, params):
        longest = max(longest, result.stats.prompt_tokens + result.stats.generated_tokens)
    if not sums.steps:
        raise ConfigError(
            f"no decode step had more than token_budget {token_budget} tokens (the longest prompt "
            f"and its continuation have {longest}); give longer prompts or a lower token_budget"
        )
    return Measurement(
        model=model.name,
        layers=geometry.full_attention,
        token_budget=token_budget,
        recall=(sums.recall / sums.steps).tolist(),
        error=(sums.error / sums.steps).tolist(),
        shift=(sums.shift / sums.steps).tolist(),
        steps=sums.steps,
        sparse_share=sums.share / sums.steps,
    )


class _Sums:
    """Running sums over steps and sequences, on the host in float64."""

    def __init__(self, delta: Delta, geometry: Geometry) -> None:
        self.delta = delta
        self.layers = geometry.full_attention
        depth = geometry.num_layers
        self.recall = torch.zeros(depth, depth, dtype=torch.float64)
        self.error = torch.zeros(depth, depth, dtype=torch.float64)
        self.shift = torch.zeros(depth, dtype=torch.float64)
        self.share = 0.0
        self.steps = 0
        self._chosen: list[tuple[Selection, Tensor]] = []  # selections of the layers so far
        self._before: Tensor | None = None  # page distribution of the layer before, [B, M]

    def add(
        self,
        layer: int,
        largest: Tensor,
        mass: Tensor,
        step: Step,
        full: Tensor,
        output: Callable[[Selection], Tensor],
    ) -> None:
        """Adds a layer of a step.

        largest, mass: its scores [B, M] per page, summed maxima and summed weights. full: its
        output [B, Hq, Dv]; output(selection): the output over a selection.
        """
        place = self.layers.index(layer)
        tokens = self.delta.token_budget // step.page_size * step.page_size
        counts = (step.lengths > tokens).double()  # [B]
        if not counts.any():
            return
        if place == 0:
            self._chosen, self._before = [], None
            self.steps += int(counts.sum())
            self.share += float((tokens / step.lengths.double()) @ counts)
        share = mass.double() / mass.double().sum(1, keepdim=True)
        if self._before is not None:
            variation = (share - self._before).abs().sum(1) / 2
            self.shift[layer] += float(variation @ counts)
        self._chosen.append(self._choice(layer, largest, step))
        for other, (selection, pages) in zip(self.layers, self._chosen, strict=False):
            self.recall[other, layer] += float((share * pages).sum(1) @ counts)
            error = dense_run.output_error(full, output(selection))
            self.error[other, layer] += float(error @ counts)
        self._before = share

    def _choice(self, layer: int, largest: Tensor, step: Step) -> tuple[Selection, Tensor]:
        """What DELTA selects by these scores, and a mask of its pages, float64 [B, M]."""
        self.delta.on_scores(layer, (largest[:, None],), step)
        assert step.shared_selection is not None
        chosen, step.shared_selection = step.shared_selection, None
        pages = members(chosen.indices, largest.shape[1])[:, 0]
        return chosen, pages.double()


def _observe(
    model: Model, sums: _Sums, batch: Batch, layer: int, query: Tensor, options: dict[str, Any]
) -> None:
    """Adds a layer of a decode step, computed from its queries and its cache."""
    step, cache = batch.step, batch.cache
    if step is None or options["window"] is not None:
        return
    query = query[: batch.num_decode]
    pages = (cache.keys[layer], cache.values[layer])
    paged = kernels.PagedQuery(query, *pages, step.page_table, step.lengths)
    others = {name: value for name, value in options.items() if name != "window"}
    requests = ScoreRequest("max", step.page_size), ScoreRequest("sum", step.page_size)
    full, scores = kernels.attend_and_score(paged, requests=requests, **others)

    def output(selection: Selection) -> Tensor:
        out = kernels.attend(paged, selection=selection, **others)
        return expanded(model, cache.geometry, layer, out)

    everything = expanded(model, cache.geometry, layer, full)
    sums.add(layer, scores[0][:, 0], scores[1][:, 0], step, everything, output)


@dataclass(frozen=True, kw_only=True)
class _Watched(Full):
    """Full attention without CUDA graphs, so that every layer of every step can be observed."""

    capturable: ClassVar[bool | str] = "its steps are observed"


#: Blocks of each document cut from a text: three times as many as an outlier needs.
DOCUMENT_BLOCKS = 32


def measure(
    model: Model,
    documents: Sequence[Sequence[int]],
    *,
    block_size: int = BLOCK_SIZE,
    num_stable_layers: int = NUM_STABLE,
) -> Stability:
    """The stable layers over these documents, each a list of token ids.

    ConfigError for invalid settings, for token ids that the model does not know, and if no document
    has the 11 middle blocks that an outlier needs.
    """
    require(is_count(block_size), "block_size", block_size, "at least 1")
    if not all(documents):
        raise ConfigError("a calibration document is empty; leave it out")
    every = (token for document in documents for token in document)
    wrong = [token for token in every if not 0 <= token < model.vocab_size]
    if wrong:
        raise ConfigError(
            f"token id {wrong[0]} of a document is not one of this model's, 0 to "
            f"{model.vocab_size - 1}"
        )
    lengths = [-(-len(document) // block_size) for document in documents]
    depth = model.geometry(EngineConfig.page_size).num_layers
    require_measurable(lengths, depth, num_stable_layers)  # before the work
    engine = LLM(model, max_batch=1, prefix_cache=False).engine
    alphas: list[Tensor] = []
    for document in tqdm(documents, unit="document", desc="calibrate", disable=None):
        record = encode(
            model,
            engine.cache,
            np.asarray(document, np.int64),
            block_size=block_size,
            chunk=engine.config.prefill_chunk,
        )
        alphas.append(torch.stack([layer.alpha for layer in record.layers]))
    scores, stable = stable_layers(alphas, num_stable_layers)
    return Stability(
        model=model.name,
        num_layers=len(scores),
        num_documents=len(alphas),
        block_size=block_size,
        stable_layers=tuple(stable),
        scores=tuple(scores),
    )


def cut(
    model: Model, texts: Sequence[Prompt], *, block_size: int = BLOCK_SIZE, most: int
) -> list[list[int]]:
    """Texts as at most `most` documents of at most DOCUMENT_BLOCKS blocks.

    Parts that are too short are left out; if there are too many parts, they are taken evenly from
    all.
    """
    size = min(DOCUMENT_BLOCKS * block_size, model.max_length - 1)
    parts: list[list[int]] = []
    for text in texts:
        ids = given_ids("a document", text)
        if ids is None:
            ids = encode_text(model.tokenizer, str(text), special=False)
        parts += [ids[start : start + size] for start in range(0, len(ids), size)]
    longest = max((len(part) for part in parts), default=0)
    # Half of a document still has 11 blocks between its ends.
    parts = [part for part in parts if 2 * len(part) >= longest]
    if len(parts) <= most:
        return parts
    return [parts[i * len(parts) // most] for i in range(most)]

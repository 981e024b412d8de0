"""Measures a model for DELTA: which layers' choices of pages serve which other layers.

The model runs densely; at each decode step every full-attention layer gives the two scores that
matter, so one run measures every possible placement at once:

    recall[a, b]   mean share of layer b's attention that falls on the pages layer a would choose
    shift[b]       mean total variation between the page distributions of layer b and the
                   full-attention layer before it: half the sum of |differences|, from 0 to 1

`keyhole.policy.calibration` turns either into a placement. Only steps of more than `token_budget`
tokens count: in shorter ones DELTA chooses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keyhole.cache.layout import Geometry
from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.llm import LLM
from keyhole.engine.text import Prompt
from keyhole.errors import ConfigError
from keyhole.models.loading import Model
from keyhole.policy.base import ScoreRequest, Step
from keyhole.policy.calibration import Calibration, place_by_recall, place_by_shift
from keyhole.policy.delta import Delta
from keyhole.policy.full import Full

Method = Literal["optimal", "paper"]


class Role(NamedTuple):
    """What a layer reads: its own window, everything, everything to choose, or another's choice.

    chooser: the layer whose pages a sparse layer reads.
    """

    kind: Literal["window", "full", "selects", "sparse"]
    chooser: int | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a dense run showed: recall [L][L] and shift [L] of the module docstring.

    `layers` are those with full attention; entries of others are 0. steps: decode steps counted.
    """

    model: str
    layers: tuple[int, ...]
    token_budget: int
    recall: list[list[float]]
    shift: list[float]
    steps: int

    def place(
        self, method: Method, num_delta_layers: int, full_layers: Sequence[int]
    ) -> Calibration:
        """Chooses the delta layers by "optimal" or "paper", and the recall to expect of each."""
        depth = len(self.recall)
        candidates = [layer for layer in self.layers if layer not in full_layers]
        if method == "paper":
            delta = place_by_shift(self.shift, candidates, num_delta_layers)
        else:
            delta = place_by_recall(self.recall, candidates, num_delta_layers)
        roles = self.roles(full_layers, delta)
        # A layer that reads everything loses nothing.
        expected = [
            1.0 if role.chooser is None else self.recall[role.chooser][layer]
            for layer, role in enumerate(roles)
        ]
        return Calibration(
            model=self.model,
            method=method,
            num_layers=depth,
            token_budget=self.token_budget,
            full_layers=tuple(sorted(full_layers)),
            delta_layers=tuple(delta),
            recall=tuple(round(value, 4) for value in expected),
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


def calibrate(
    model: Model,
    prompts: list[Prompt],
    *,
    method: Method = "optimal",
    num_delta_layers: int = 3,
    token_budget: int = Delta.token_budget,
    recent_pages: int | None = None,
    full_layers: Sequence[int] = (0, 1),
    max_tokens: int = 64,
) -> Calibration:
    """Measures and places in one go: see `measure` and `Measurement.place`."""
    found = measure(
        model, prompts, token_budget=token_budget, recent_pages=recent_pages, max_tokens=max_tokens
    )
    return found.place(method, num_delta_layers, full_layers)


def measure(
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
    recorder = _Recorder(sums=_Sums(delta.resolve(geometry), geometry))
    llm = LLM(model, policy=recorder, page_size=page_size)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    longest = 0
    for result in llm.generate(prompts, params):
        longest = max(longest, result.stats.prompt_tokens + result.stats.generated_tokens)
    sums = recorder.sums
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
        shift=(sums.shift / sums.steps).tolist(),
        steps=sums.steps,
    )


class _Sums:
    """Running sums over steps and sequences, on the host in float64."""

    def __init__(self, delta: Delta, geometry: Geometry) -> None:
        self.delta = delta
        self.layers = geometry.full_attention
        depth = geometry.num_layers
        self.recall = torch.zeros(depth, depth, dtype=torch.float64)
        self.shift = torch.zeros(depth, dtype=torch.float64)
        self.steps = 0
        self._chosen: list[Tensor] = []  # of the layers before: which pages they choose, [B, M]
        self._before: Tensor | None = None  # page distribution of the layer before, [B, M]

    def add(self, layer: int, largest: Tensor, mass: Tensor, step: Step) -> None:
        """Takes a layer's scores [B, M] per page: summed maxima and summed weights."""
        place = self.layers.index(layer)
        tokens = self.delta.token_budget // step.page_size * step.page_size
        counts = (step.lengths > tokens).double()  # [B]
        if place == 0:
            self._chosen, self._before = [], None
            self.steps += int(counts.sum())
        share = mass.double() / mass.double().sum(1, keepdim=True)
        for other, chosen in zip(self.layers[:place], self._chosen, strict=True):
            self.recall[other, layer] += float((share * chosen).sum(1) @ counts)
        if self._before is not None:
            variation = (share - self._before).abs().sum(1) / 2
            self.shift[layer] += float(variation @ counts)
        chosen = self._pages(layer, largest, step)
        self.recall[layer, layer] += float((share * chosen).sum(1) @ counts)
        self._chosen.append(chosen)
        self._before = share

    def _pages(self, layer: int, largest: Tensor, step: Step) -> Tensor:
        """The pages that DELTA chooses by these scores, as 0 and 1, float64 [B, M]."""
        self.delta.on_scores(layer, (largest[:, None],), step)
        assert step.carry is not None
        indices = step.carry.indices[:, 0].long()
        chosen = torch.zeros_like(largest, dtype=torch.float64)
        return chosen.scatter_reduce(1, indices.clamp(min=0), (indices >= 0).double(), "amax")


@dataclass(frozen=True, kw_only=True)
class _Recorder(Full):
    """Full attention that gives every layer's scores to `sums`."""

    sums: _Sums

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """DELTA's page scores, and attention mass."""
        return ScoreRequest("max", step.page_size), ScoreRequest("sum", step.page_size)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """Adds them up."""
        self.sums.add(layer, scores[0][:, 0], scores[1][:, 0], step)

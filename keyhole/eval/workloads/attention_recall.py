"""Recall of attention: the share of full attention's weights on what a policy reads, per layer.

The same text is forced twice through decode steps: under the policy, which leaves a record of what
every layer read, and under full attention, whose weights (softmax over all tokens, each query head
its own) are then summed where the policy had read. Both see the same tokens, but the policy's
queries are its own: what it lost before counts, as it does in use.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.layout import Geometry
from keyhole.engine.sequence import Sequence as Running
from keyhole.eval.trace.trace import Trace, Traced
from keyhole.eval.workloads.generation import Served, serve
from keyhole.eval.workloads.perplexity import Likelihood, Perplexity, fields, forced
from keyhole.eval.workloads.workload import MakeEngine
from keyhole.kernels import ScoreRequest, Selection
from keyhole.policies.base import Policy, Step
from keyhole.policies.controls import Full

#: What a layer read of a sequence: int [Hkv or 1, n], -1 is padding, and its unit.
_Read = tuple[np.ndarray, int]


class SampleRows:
    """Which sample stands in which row of a step: a slot is a sample's until it is done."""

    def __init__(self) -> None:
        self._of_slot: dict[int, int] = {}

    def update(self, left: Mapping[Running, int], first: int = 0) -> None:
        """To be called after every step: before a sequence decodes, it has read its prompt.

        It keeps its slot to the end: pages for all that is forced are its own from the start.

        first: the number of the sample that `left` counts from.
        """
        self._of_slot |= {s.slot: first + n for s, n in left.items() if s.slot >= 0}

    def keys(self, step: Step) -> list[tuple[int, int]]:
        """Sample and length of each row."""
        samples = [self._of_slot[slot] for slot in step.sequences.slots.tolist()]
        return list(zip(samples, step.sequences.host_lengths.tolist(), strict=True))


@dataclass(eq=False)
class SampleReads(Trace):
    """What each sample read at each length, by layer; None is everything."""

    rows: SampleRows = field(default_factory=SampleRows)
    found: dict[tuple[int, int, int], _Read | None] = field(default_factory=dict)

    def record(self, layer: int, selection: Selection | None, step: Step) -> None:
        """Keeps it on the host."""
        read = self.read(layer, selection, step)
        for row, key in enumerate(self.rows.keys(step)):
            self.found[*key, layer] = None if read is None else (read.indices[row], read.unit)


@dataclass(frozen=True, kw_only=True)
class Judge(Full):
    """Full attention that sums its weights where the policy read."""

    reads: SampleReads
    rows: SampleRows = field(default_factory=SampleRows)
    shares: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """Per sample and layer, a share for every step: the mean over query heads."""

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """The weights of each query head."""
        return (ScoreRequest("none", 1),)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """Adds the shares of this step."""
        for row, (sample, length) in enumerate(self.rows.keys(step)):
            read = self.reads.found.pop((sample, length, layer))
            share = 1.0 if read is None else recall(scores[0][row, :, :length], *read)
            self.shares.setdefault((sample, layer), []).append(share)


def recall(weights: Tensor, indices: np.ndarray, unit: int) -> float:
    """Share of the weights on what was read, mean over query heads.

    weights: float32 [Hq, N]. indices: int [H, n] of entries of `unit` tokens, -1 is padding; H is
    1, Hkv or Hq.
    """
    heads, length = weights.shape
    seen = torch.zeros(len(indices), -(-length // unit) + 1, dtype=torch.bool)
    seen.scatter_(
        1, torch.from_numpy(indices).long() % seen.shape[1], True
    )  # padding falls on the last, -1
    tokens = seen[:, :-1].repeat_interleave(unit, 1)[:, :length].to(weights.device)
    tokens = tokens.repeat_interleave(heads // len(tokens), 0)
    return float(((weights * tokens).sum(1) / weights.sum(1)).mean())


class AttentionRecall(Perplexity):
    """Recall of attention, and perplexity beside it; the score is the mean recall."""

    name = "attention_recall"

    def measure(
        self, make_engine: MakeEngine, policy: Policy, length: int, setup: str, samples: int
    ) -> dict[str, Any]:
        """Forces every window under the policy and under full attention."""
        windows = [self._text.window(length, number) for number in range(samples)]
        requests, likelihood = [forced(window) for window in windows], Likelihood(windows)
        rows = SampleRows()
        reads = SampleReads(rows=rows)
        judge = Judge(reads=reads, rows=rows)
        under_policy, dense = make_engine(Traced(policy, trace=reads)), make_engine(judge)
        sequences: list[Running] = []
        # As many as run at once, so that no longer a record must be kept than needed.
        for first in range(0, samples, dense.config.max_batch):
            some = requests[first : first + dense.config.max_batch]

            def update(left: Mapping[Running, int], first: int = first) -> None:
                rows.update(left, first)

            def take(left: Mapping[Running, int], first: int = first) -> None:
                update(left, first)
                likelihood.take({s: first + number for s, number in left.items()})

            sequences += serve(under_policy, some, take).sequences
            serve(dense, [dataclasses.replace(one, keep_logits=False) for one in some], update)
        cache = under_policy.cache
        # No time: the record slows every step.
        served = Served(
            sequences=sequences,
            step_ms=None,
            step_batch=None,
            peak_bytes=cache.peak_pages * cache.page_bytes,
        )
        shares = _shares(judge, dense.geometry, samples)
        scores = [statistics.fmean(row) for row in shares]
        return {
            **fields(likelihood.nlls()),
            **self._costs(served),
            "score": statistics.fmean(scores),
            "scores": scores,
            "recall_per_layer": [statistics.fmean(column) for column in zip(*shares, strict=True)],
        }


def _shares(judge: Judge, geometry: Geometry, samples: int) -> list[list[float]]:
    """Per sample and layer, the mean over steps; 1 for a layer that reads its own window."""
    return [
        [
            statistics.fmean(judge.shares.get((sample, layer), [1.0]))
            for layer in range(geometry.num_layers)
        ]
        for sample in range(samples)
    ]

"""How long an evaluation will take at most, from a short timed probe, before it begins.

Prompts and decode steps are assumed to grow linearly with the tokens before them: the weights cost
the same in every step, attention as much as there is to read. Every answer is assumed to reach its
maximum length, every policy's step to take as long as full attention's, and methods over stored
documents to compute the whole prompt, as `recompute` does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence as Running
from keyhole.eval.run import Group
from keyhole.eval.tasks import Sample
from keyhole.eval.workload import Request
from keyhole.models.loading import Model
from keyhole.policies.controls import Full

#: Chunks of a prompt from which the growth is read, where the prompt is long enough.
_CHUNKS = 4
#: Decode steps that are timed, after one that is not.
_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class LinearTime:
    """Seconds that something takes: `base`, and `slope` for each token before it."""

    base: float
    slope: float

    @classmethod
    def through(cls, tokens: list[float], seconds: list[float]) -> LinearTime:
        """Least squares; neither falls with the length nor costs less than nothing."""
        slope = 0.0
        if len(set(tokens)) > 1:
            slope = max(0.0, float(np.polyfit(tokens, seconds, 1)[0]))
        base = float(np.mean(seconds)) - slope * float(np.mean(tokens))
        return cls(base=max(0.0, base), slope=slope)

    def at(self, tokens: float) -> float:
        """Seconds with so many tokens before it."""
        return self.base + self.slope * tokens


@dataclass(frozen=True, kw_only=True)
class Speed:
    """chunk_tokens: of a chunk of a prompt; batch: sequences of a decode step."""

    chunk_tokens: int
    chunk: LinearTime
    batch: int
    step: LinearTime

    def prefill(self, tokens: float) -> float:
        """Seconds of a prompt of so many tokens."""
        chunks = math.ceil(tokens / self.chunk_tokens)
        # The contexts of the chunks are 0, 1, ... times as long as one.
        before = self.chunk_tokens * chunks * (chunks - 1) / 2
        share = tokens / (chunks * self.chunk_tokens)
        return share * (self.chunk.base * chunks + self.chunk.slope * before)

    def decode(self, tokens: float, new_tokens: float, samples: int) -> float:
        """Seconds in which so many samples of this length are answered, a batch at a time."""
        rounds = math.ceil(samples / self.batch)
        return rounds * new_tokens * self.step.at(tokens + new_tokens / 2)


def probe(model: Model, length: int, batch: int) -> Speed:
    """Times one prompt of `length` tokens and a few steps of `batch` sequences after it, dense."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (length,), generator=generator).tolist()
    size = EngineConfig.page_size
    chunk = min(EngineConfig.prefill_chunk, max(size, length // _CHUNKS))
    config = EngineConfig(max_batch=batch, prefill_chunk=chunk)
    engine = Engine(model, Full(), config)
    long = tokens[: max(1, length - _STEPS - 2)]
    short = long[-chunk:]
    _steps(engine, short, batch)  # what is done once, at first use
    contexts, chunks = _chunks(engine, long)
    ends = [float(len(short)), float(len(long))]
    steps = [_steps(engine, short, batch), _steps(engine, long, batch)]
    return Speed(
        chunk_tokens=chunk,
        chunk=LinearTime.through(contexts, chunks),
        batch=batch,
        step=LinearTime.through(ends, steps),
    )


def _chunks(engine: Engine, tokens: list[int]) -> tuple[list[float], list[float]]:
    """Tokens before each whole chunk of a prompt, and the seconds that it took."""
    sequence = _add(engine, tokens, 1)
    edges, times = [0], [_now(engine)]
    while not sequence.is_finished:
        engine.step()
        edges.append(min(sequence.num_computed, len(tokens)))
        times.append(_now(engine))
    size = engine.config.prefill_chunk
    found = [
        (float(before), (end - begin) * size / (after - before))
        for (before, after), (begin, end) in zip(pairwise(edges), pairwise(times), strict=True)
        if after - before == size or len(edges) == 2
    ]
    return [one[0] for one in found], [one[1] for one in found]


def _steps(engine: Engine, tokens: list[int], batch: int) -> float:
    """Median seconds of a decode step after this prompt; its pages are shared."""
    first = _add(engine, tokens, 1)
    while not first.is_finished:
        engine.step()
    sequences = [_add(engine, tokens, _STEPS + 2) for _ in range(batch)]
    while any(len(one.generated) < 1 for one in sequences):
        engine.step()
    engine.step()
    times = []
    for _ in range(_STEPS):
        begin = _now(engine)
        engine.step()
        times.append(_now(engine) - begin)
    for one in sequences:
        engine.abort(one)
    return float(np.median(times))


def _now(engine: Engine) -> float:
    """Seconds, once the device has done what it was given."""
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)
    return time.perf_counter()


def _add(engine: Engine, tokens: list[int], new_tokens: int) -> Running:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return engine.add(tokens, params)


@dataclass(frozen=True, kw_only=True)
class PartEstimate:
    """A part of the evaluation: cells, or questions, those stored among them, and the seconds of
    the rest.
    """

    name: str
    unit: str
    number: int
    stored: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Samples of one task and length. missing: policies that are still to answer them."""

    request: Request
    samples: int
    missing: int

    @classmethod
    def of(cls, group: Group, missing: int) -> Answers:
        """Of a group's first sample: the others are about as long."""
        request = group.workload.shown(group.length, group.setup).request
        return cls(request=request, samples=group.samples, missing=missing)

    def seconds(self, speed: Speed, shared_tokens: float) -> float:
        """shared_tokens: of prompts that are computed once for all policies, at most so many."""
        if not self.missing:
            return 0.0
        one = self.request
        tokens = len(one.prompt)
        kept = min(1.0, shared_tokens / (tokens * self.samples))
        prefills = kept + (1 - kept) * self.missing
        written = len(one.given) + one.max_tokens
        return prefills * self.samples * speed.prefill(tokens) + self.missing * speed.decode(
            tokens, written, self.samples
        )


def question_seconds(speed: Speed, sample: Sample, methods: int) -> float:
    """One question over documents that are stored first, under so many methods, one at a time."""
    documents = max(1, len(sample.documents))
    stored = documents * speed.prefill(sample.prompt_tokens / documents)
    answered = speed.prefill(sample.prompt_tokens) + sample.max_new_tokens * speed.step.at(
        sample.prompt_tokens
    )
    return stored + methods * answered


def text(parts: Sequence[PartEstimate]) -> str:
    """For people, in a line: what there is to do, what is stored, and how long the rest takes."""
    told = [
        f"{part.name}: {part.number:,} {part.unit}{'s' * (part.number != 1)}, "
        f"{part.stored:,} stored"
        + (f", the rest at most {duration(part.seconds)}" if part.stored < part.number else "")
        for part in parts
        if part.number
    ]
    left = sum(part.seconds for part in parts)
    return f"{'; '.join(told)}. Altogether at most about {duration(left)}."


def duration(seconds: float) -> str:
    """For people: 40 s, 12 min, 3.5 h, 2.1 days."""
    for limit, size, unit in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"

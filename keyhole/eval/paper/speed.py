"""A short timed probe: how long prompts and decode steps of this model take on this machine.

Both are taken to grow linearly with the tokens that stand before them: the weights cost the same in
every step, attention as much as there is to read.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.models.loading import Model
from keyhole.policies.controls import Full

#: Chunks of a prompt from which the growth is read, where the prompt is long enough.
_CHUNKS = 4
#: Decode steps that are timed, after one that is not.
_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Line:
    """Seconds that something takes: `base`, and `slope` for each token before it."""

    base: float
    slope: float

    @classmethod
    def through(cls, tokens: list[float], seconds: list[float]) -> Line:
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
    chunk: Line
    batch: int
    step: Line

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
        chunk=Line.through(contexts, chunks),
        batch=batch,
        step=Line.through(ends, steps),
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


def _add(engine: Engine, tokens: list[int], new_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return engine.add(tokens, params)

"""Runs the requests of an evaluation through an engine, as many at once as it takes, and counts.

Sparse decoding is what is evaluated, so a request may bring tokens that are not part of its dense
prompt: they go through decode steps under the policy, one by one, as generated ones do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from keyhole.config import SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Counters
from keyhole.engine.sequence import Sequence as Running

#: Called after each step with the requests that are not done, by their number.
AfterStep = Callable[[dict[Running, int]], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Token ids: `prompt` is read densely, `given` under the policy, before anything is chosen."""

    prompt: list[int]
    given: list[int]
    max_tokens: int
    keep_logits: bool = False

    @property
    def params(self) -> SamplingParams:
        """Greedy, whatever the model's generation_config says."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=0.0, repetition_penalty=1.0)


@dataclass(frozen=True, kw_only=True)
class Served:
    """The finished requests in their order, and what they cost together.

    step_ms: median of the steps in which no prompt was read, and step_batch: how many requests
    these had, on average; None if there were none.
    peak_bytes: the most that the cache held at once: keys, values and the policy's data.
    """

    sequences: list[Running]
    step_ms: float | None
    step_batch: float | None
    peak_bytes: int

    @property
    def generated(self) -> list[list[int]]:
        """The tokens that each request chose itself."""
        return [s.generated[len(s.given) :] for s in self.sequences]

    def costs(self) -> dict[str, Any]:
        """The fields of a line that say what it cost; see docs/evaluation.md."""
        total = sum((s.counters for s in self.sequences), Counters())
        steps = total.steps or None
        return {
            "tokens_generated": statistics.fmean(map(len, self.generated)),
            "answer_lengths": [len(tokens) for tokens in self.generated],
            "decode_steps": total.steps,
            "read_share": steps and total.attended_fraction / steps,
            "bytes_per_step": steps and (total.kv_bytes + total.other_bytes) / steps,
            "step_ms": self.step_ms,
            "step_batch": self.step_batch,
            "peak_bytes": self.peak_bytes,
        }


def serve(
    engine: Engine, requests: Sequence[Request], after_step: AfterStep | None = None
) -> Served:
    """Runs all to their end; raises the first error. An interrupt frees all of them."""
    left = {
        engine.add(one.prompt, one.params, given=one.given, keep_logits=one.keep_logits): number
        for number, one in enumerate(requests)
    }
    sequences, times, batches = list(left), [], []
    bar = tqdm(total=len(left), unit="sample", disable=None, leave=False)
    try:
        with bar:
            while left:
                before = {s: s.num_computed for s in left}
                begin = time.perf_counter()
                engine.step()
                spent = 1e3 * (time.perf_counter() - begin)
                advanced = [s.num_computed - before[s] for s in left]
                if max(advanced) <= 1:
                    times.append(spent)
                    batches.append(sum(advanced))
                if after_step is not None:
                    after_step(left)
                for sequence in [s for s in left if s.is_finished]:
                    if sequence.error is not None:
                        raise sequence.error
                    del left[sequence]
                    bar.update()
    finally:
        for sequence in left:
            engine.abort(sequence)
    return Served(
        sequences=sequences,
        step_ms=statistics.median(times) if times else None,
        step_batch=statistics.fmean(batches) if batches else None,
        peak_bytes=engine.cache.peak_pages * engine.cache.page_bytes,
    )

"""Runs the samples of one cell as requests, and counts their costs.

A request may have tokens after its dense prompt that go through decode steps under the policy, one
by one, as generated tokens do: sparse decoding is what is evaluated.
"""

from __future__ import annotations

import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from keyhole.config import SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence as Running
from keyhole.errors import ConfigError
from keyhole.eval.tasks import Sample, Task, token_counter
from keyhole.models.model import Model
from keyhole.policies.base import Policy

#: Called after each step with the numbers of the unfinished requests.
AfterStep = Callable[[dict[Running, int]], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Token ids: `prompt` is read densely, then `given` under the policy, before anything is
    generated.
    """

    prompt: list[int]
    given: list[int]
    max_tokens: int
    keep_logits: bool = False

    @property
    def params(self) -> SamplingParams:
        """Greedy, regardless of the model's generation_config."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=0.0, repetition_penalty=1.0)


@dataclass(frozen=True, kw_only=True)
class Served:
    """The finished requests in order, and their total costs.

    step_ms: median of the steps without prompt tokens, and step_batch: the mean number of requests
    in these; None if there were none. peak_bytes: the largest size of the cache: keys, values and
    the policy's data.
    """

    sequences: list[Running]
    step_ms: float | None
    step_batch: float | None
    peak_bytes: int

    @property
    def generated(self) -> list[list[int]]:
        """The tokens that each request generated."""
        return [s.generated[len(s.given) :] for s in self.sequences]

    def costs(self) -> dict[str, Any]:
        """The fields of a line for the costs; see docs/evaluation.md."""
        counters = [s.counters for s in self.sequences]
        steps = sum(c.steps for c in counters) or None
        num_bytes = sum(c.kv_bytes + c.other_bytes for c in counters)
        prompts = [s.stats().prompt_attended_fraction for s in self.sequences]
        read = [share for share in prompts if share is not None]
        return {
            "tokens_generated": statistics.fmean(map(len, self.generated)),
            "answer_lengths": [len(tokens) for tokens in self.generated],
            "decode_steps": steps or 0,
            "read_share": steps and sum(c.attended_fraction for c in counters) / steps,
            "prompt_read_share": statistics.fmean(read) if read else None,
            "bytes_per_step": steps and num_bytes / steps,
            "step_ms": self.step_ms,
            "step_batch": self.step_batch,
            "peak_bytes": self.peak_bytes,
        }


def serve(
    engine: Engine, requests: Sequence[Request], after_step: AfterStep | None = None
) -> Served:
    """Runs all requests to their end; raises the first error. An interrupt frees all of them."""
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


_STEPS_BETWEEN_CHECKS = 16
"""Of an answer that may be wrong already; a check reads the whole answer."""

FIRST_SEED = "first_seed"
"""The field of a line for the number of the first sample, if that is not 0."""

#: Makes an empty engine that runs under a policy.
MakeEngine = Callable[[Policy], Engine]


@dataclass(frozen=True)
class Shown:
    """A sample as a request, and the positions of the facts that the answer needs."""

    request: Request
    marks: tuple[int, ...] = ()


class Workload(ABC):
    """Samples with scores. `settings`: identify the samples, together with the name."""

    name: str
    settings: dict[str, Any]
    has_question: bool = True
    """Whether the setups differ; for samples without a question they are the same."""

    @abstractmethod
    def available(self, length: int, limit: int) -> int:
        """Number of samples of this length, at most `limit`.

        ConfigError if there is none.
        """

    @abstractmethod
    def measure(
        self, make_engine: MakeEngine, policy: Policy, length: int, setup: str, samples: int
    ) -> dict[str, Any]:
        """Runs the first `samples` samples; the measured fields of a line."""

    @abstractmethod
    def shown(self, length: int, setup: str) -> Shown:
        """The first sample, for pictures."""

    def beside(self, found: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
        """Further fields, from a comparison with full attention."""
        return {}


class Answered(Workload):
    """A task that is answered by generation.

    first_seed: of its first sample. only_scores: answers end where they cannot be right any more;
    scores stay the same, and costs are those of the steps that were run.
    """

    def __init__(
        self, task: Task, model: Model, first_seed: int = 0, *, only_scores: bool = False
    ) -> None:
        if model.tokenizer is None:
            raise ConfigError(f"task {task.name} is text, and {model.name} has no tokenizer")
        self.name = task.name
        self.settings = task.settings
        if first_seed:  # lines without it have the samples from 0 on
            self.settings[FIRST_SEED] = first_seed
        self._first_seed, self._only_scores = first_seed, only_scores
        self._task, self._tokenizer = task, model.tokenizer
        self._made: dict[int, list[Sample]] = {}  # of the last length

    def samples(self, length: int, number: int) -> list[Sample]:
        """The first samples of a length; cached, because all policies get the same ones."""
        made = self._made.get(length, [])
        count = token_counter(self._tokenizer)
        made += [
            self._task.make(length, self._first_seed + number, count)
            for number in range(len(made), number)
        ]
        self._made = {length: made}
        return made[:number]

    def available(self, length: int, limit: int) -> int:
        """The limit; samples are made from seeds."""
        self.samples(length, 1)
        return limit

    def measure(
        self, make_engine: MakeEngine, policy: Policy, length: int, setup: str, samples: int
    ) -> dict[str, Any]:
        """Answers, scored by the task."""
        asked = self.samples(length, samples)
        requests = self.requests(asked, setup)
        engine = make_engine(policy)
        served = serve(engine, requests, self._stop(engine, asked) if self._only_scores else None)
        answers = [sequence.detokenizer.text for sequence in served.sequences]
        return self.fields(asked, requests, answers) | served.costs()

    def _stop(self, engine: Engine, asked: Sequence[Sample]) -> AfterStep:
        steps = itertools.count(1)

        def stop(left: dict[Running, int]) -> None:
            if next(steps) % _STEPS_BETWEEN_CHECKS:
                return
            for sequence, number in left.items():
                if not self._task.can_be_right(asked[number], sequence.detokenizer.text):
                    engine.abort(sequence)

        return stop

    def requests(self, asked: Sequence[Sample], setup: str) -> list[Request]:
        """The samples in tokens."""
        return [request(self._tokenizer, sample, setup) for sample in asked]

    def fields(
        self, asked: Sequence[Sample], requests: Sequence[Request], answers: Sequence[str]
    ) -> dict[str, Any]:
        """The fields of a line for these answers, without costs."""
        scores = [
            self._task.score(sample, answer) for sample, answer in zip(asked, answers, strict=True)
        ]
        one_each = all(len(sample.depths) == 1 for sample in asked)
        return {
            "score": statistics.fmean(scores),
            "scores": scores,
            "depths": [sample.depths[0] for sample in asked] if one_each else None,
            "tokens_prompt": statistics.fmean(len(r.prompt) + len(r.given) for r in requests),
            "recall_per_layer": None,
            "selection_maps": None,
        }

    def shown(self, length: int, setup: str) -> Shown:
        """With marks where the needed sentences begin."""
        (sample,) = self.samples(length, 1)
        asked = request(self._tokenizer, sample, setup)
        tokens = [*asked.prompt, *asked.given]
        # A depth is a share of letters; multiplying it back may not give a whole number.
        ends = [round(depth * len(sample.context)) for depth in sample.depths]
        marks = (_common(tokens, _ids(self._tokenizer, sample.context[:end])) for end in ends)
        return Shown(asked, tuple(marks))


def request(tokenizer: Any, sample: Sample, setup: str) -> Request:
    """The request of a sample; both setups have the same tokens, but the dense prompt ends
    elsewhere.

    A token with characters of both the context and the question belongs to the question.
    """
    tokens = _ids(tokenizer, sample.prompt)
    end = len(tokens)
    if setup == "question":
        end = max(1, _common(tokens, _ids(tokenizer, sample.context)))
    return Request(prompt=tokens[:end], given=tokens[end:], max_tokens=sample.max_new_tokens)


def _ids(tokenizer: Any, text: str) -> list[int]:
    # Without the warning about length: the engine checks it.
    return [int(token) for token in tokenizer(text, verbose=False).input_ids]


def _common(tokens: list[int], others: list[int]) -> int:
    """Length of the common prefix; tokens that a tokenizer adds after a text do not count."""
    pairs = zip(tokens, others, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

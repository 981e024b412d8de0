"""How much longer steps take while a question over stored documents is admitted.

Some requests decode. A question over stored documents arrives, and its documents are filled during
their steps. The result is the longest step until the question's first token, divided by the median
of the steps just before the question. The same number of steps without a question is measured in
the same way, to show the noise of the machine. On a CPU the measurement is repeated with the CPU
time of this process, which other processes do not affect. The same question alone shows the cost of
cutting the work into parts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from keyhole.bench import measure
from keyhole.bench.measure import Report, Result
from keyhole.bench.settings import AdmissionSettings
from keyhole.config import SamplingParams, require
from keyhole.engine.sequence import Sequence
from keyhole.llm import LLM
from keyhole.models.model import Model
from keyhole.reuse import make_reuse

#: Untimed steps after the prompts of the others.
_WARM_UP = 40
#: Steps for the median.
_STEPS = 40
#: Largest allowed ratio of a step to the median while a question is admitted.
_MOST = 2.0


def run(model: Model, settings: AdmissionSettings, report: Report) -> dict[str, Any]:
    """Measures every method; returns the part of a line of results that is specific to this
    benchmark.

    model: the bundled model. Passes each method's result to `report`.
    """
    _check(model, settings)
    bandwidth = measure.read_bandwidth(model.device)
    line: dict[str, Any] = {
        "settings": asdict(settings) | {"warm_up": _WARM_UP, "steps": _STEPS},
        "model": model.name,
        "read_bytes_per_s": bandwidth,
        "results": [],
        "bars": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for method in tqdm(settings.methods, desc="methods", leave=False, disable=None):
            found = _Case(model, settings, method, Path(folder)).result()
            line["results"].append(found)
            line["bars"] += _targets(found)
            report([found], [])
    return line


def _check(model: Model, settings: AdmissionSettings) -> None:
    """ConfigError for what would be refused once everything is stored."""
    for method in settings.methods:
        make_reuse(method)
    longest, each = model.max_length, settings.documents
    right = f"less than the {longest} tokens that the model takes"
    read = each * settings.tokens + settings.question
    what = f"documents {each} of tokens {settings.tokens} and question"
    require(read < longest, what, settings.question, right)
    what = f"prompt {settings.prompt} and others"  # whose prompts are of different lengths
    require(settings.prompt + settings.others < longest, what, settings.others, right)


def _targets(result: Result) -> list[dict[str, Any]]:
    """The target by wall time and, on a CPU, by the CPU time of the process."""
    values = {"longest step": result["longest_ratio"]}
    if result["longest_cpu_ratio"] is not None:
        values["CPU time of the longest step"] = result["longest_cpu_ratio"]
        values["CPU time of the longest step of all questions"] = result["worst_cpu_ratio"]
    return [
        {
            "bar": f"{what} / median while {result['method']} is admitted",
            "value": value,
            "wanted": f"at most {_MOST}",
            "met": value <= _MOST,
        }
        for what, value in values.items()
    ]


class _Case:
    """One reuse method: an engine, other requests that decode, and questions."""

    def __init__(
        self, model: Model, settings: AdmissionSettings, method: str, folder: Path
    ) -> None:
        self._settings = settings
        self._method = method
        self._random = np.random.default_rng(0)
        self._names = [f"document {i}" for i in range(settings.documents)]
        self._llm = LLM(model, documents=folder, max_batch=settings.others + 1, prefix_cache=False)
        for i, name in enumerate(self._names):
            ids = np.random.default_rng(i).integers(3, model.vocab_size, settings.tokens)
            self._llm.documents.add(name, {"prompt_token_ids": ids.tolist()})

    def result(self) -> Result:
        """Medians over the repetitions; the first admission, in which the cache grows, is not
        counted.
        """
        self._ask()
        alone = [self._ask() for _ in range(self._settings.repeat)]
        others = self._others()
        rounds = [self._admit() for _ in range(self._settings.repeat)]
        done = any(sequence.is_finished for sequence in others)
        right = "shorter: the others reached the model's longest sequence during the measurement"
        require(not done, "prompt", self._settings.prompt, right)
        for sequence in others:
            self._llm.engine.abort(sequence)
        middle: Result = {
            name: statistics.median(one[name] for one in rounds) for name in rounds[0]
        }
        middle["worst_cpu_ratio"] = max(one["longest_cpu_ratio"] for one in rounds)
        if self._llm.engine.model.device.type != "cpu":
            # On a GPU, the host's CPU time says nothing about the device.
            middle["longest_cpu_ratio"] = middle["worst_cpu_ratio"] = None
        return {
            "method": self._method,
            "stored_tokens": self._settings.documents * self._settings.tokens,
            **middle,
            "alone_ms": statistics.median(alone),
            "all_rounds": rounds,
            "all_alone_ms": alone,
        }

    def _ask(self) -> float:
        """Milliseconds from a question to its first token when no other request runs."""
        with ExitStack() as stack:
            return sum(wall for wall, _ in self._steps(self._submit(stack)))

    def _others(self) -> list[Sequence]:
        """Requests that decode until they are aborted; all have started to decode."""
        engine, settings = self._llm.engine, self._settings
        room = engine.max_length - settings.prompt - settings.others
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        others = [
            self._llm.submit(self._tokens(settings.prompt + i), params)
            for i in range(settings.others)
        ]
        while not all(sequence.generated for sequence in others):
            engine.step()
        for _ in range(_WARM_UP):
            engine.step()
        return others

    def _admit(self) -> dict[str, float]:
        """Admits one question while others run: times in ms, and the longest steps relative to the
        median.
        """
        control, control_cpu = zip(*(self._step() for _ in range(_STEPS)), strict=True)
        with ExitStack() as stack:
            sequence = self._submit(stack)
            steps, steps_cpu = zip(*self._steps(sequence), strict=True)
        # The same number of steps without a new question.
        calm = [self._step()[0] for _ in steps]
        median = statistics.median(control)
        return {
            "step_ms": median,
            "longest_ms": max(steps),
            "longest_ratio": max(steps) / median,
            "longest_cpu_ratio": max(steps_cpu) / statistics.median(control_cpu),
            "usual_ratio": statistics.median(steps) / median,
            "noise_ratio": max(calm) / statistics.median(calm),
            "steps": float(len(steps)),
            "ttft_ms": sum(steps),
        }

    def _steps(self, sequence: Sequence) -> list[tuple[float, float]]:
        """The results of `_step` until the question's first token."""
        steps = []
        while not sequence.generated and not sequence.is_finished:
            steps.append(self._step())
        if sequence.error is not None:
            raise sequence.error
        return steps

    def _step(self) -> tuple[float, float]:
        """Milliseconds of a step, and the CPU time of the process during it."""
        begin, begin_cpu = time.perf_counter(), time.process_time()
        self._llm.engine.step()
        spent, spent_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        return 1e3 * spent, 1e3 * spent_cpu

    def _submit(self, stack: ExitStack) -> Sequence:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        question = self._tokens(self._settings.question)
        return self._llm.submit_ask(stack, question, self._names, reuse=self._method, params=params)

    def _tokens(self, count: int) -> dict[str, list[int]]:
        ids = self._random.integers(3, self._llm.engine.model.vocab_size, count)
        return {"prompt_token_ids": ids.tolist()}

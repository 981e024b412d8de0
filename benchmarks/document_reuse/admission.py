"""How much longer steps take while a question over stored documents is admitted.

Some requests decode. A question over stored documents arrives, and its documents are filled during
their steps. The result is the longest step until the question's first token, divided by the median
of the steps just before the question. The same number of steps without a question is measured in
the same way, to show the noise of the machine. On a CPU the measurement is repeated with the CPU
time of this process, which other processes do not affect. The same question alone shows the cost of
cutting the work into parts. The model is the bundled one.

    python -m benchmarks.document_reuse.admission --output benchmarks/results/admission.jsonl
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

import keyhole
from benchmarks import command
from keyhole.bench import measure
from keyhole.bench.measure import Report, Result
from keyhole.bench.settings import DEVICES, Names
from keyhole.cli.bench import Columns, milliseconds
from keyhole.config import SamplingParams, require, require_counts, setting
from keyhole.engine.sequence import Sequence
from keyhole.llm import LLM
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.registry import parse, written

#: Untimed steps after the prompts of the others.
_WARM_UP = 40
#: Steps for the median.
_STEPS = 40
#: Largest allowed ratio of a step to the median while a question is admitted.
_MOST = 2.0

_COLUMNS: Columns = (
    ("reuse", "method", str),
    ("stored", "stored_tokens", "{:,}".format),
    ("step", "step_ms", milliseconds),
    ("longest", "longest_ms", milliseconds),
    ("longest / median", "longest_ratio", "{:.2f}".format),
    ("of CPU time", "longest_cpu_ratio", "{:.2f}".format),
    ("the worst", "worst_cpu_ratio", "{:.2f}".format),
    ("without a question", "noise_ratio", "{:.2f}".format),
    ("first token", "ttft_ms", milliseconds),
    ("alone", "alone_ms", milliseconds),
)


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """How many requests decode, and over what the question is asked."""

    methods: Names = setting(  # noqa: RUF009
        ("sam_kv", "reuse"), "reuse methods, with settings as in sam_kv:update=fusion"
    )
    documents: int = setting(4, "number of stored documents in the question")
    tokens: int = setting(3000, "tokens of each document, drawn at random")
    question: int = setting(24, "tokens of the question")
    others: int = setting(7, "other requests, which decode in the meantime")
    prompt: int = setting(4000, "tokens of each of the other prompts")
    repeat: int = setting(15, "number of questions, one after another")
    device: str = setting("auto", DEVICES)

    def __post_init__(self) -> None:
        require_counts(self, "documents", "tokens", "question", "others", "prompt", "repeat")
        named = parse(",".join(self.methods))
        object.__setattr__(self, "methods", tuple(written(s.name, s.settings) for s in named))
        require(bool(self.methods), "methods", self.methods, "at least one")


def run(settings: AdmissionSettings, report: Report) -> dict[str, Any]:
    """Measures every method; returns the part of a line of results that is specific to this
    benchmark.

    Passes each method's result to `report`.
    """
    model = load(keyhole.tiny(), str(measure.device(settings.device)))
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
            line["bars"] += _bars(found)
            report([found], [])
    return line


def _bars(result: Result) -> list[dict[str, Any]]:
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


#: Runs the benchmark with the given flags, or those of this process; returns its exit status.
main = functools.partial(
    command.main,
    "benchmarks.document_reuse.admission",
    AdmissionSettings,
    run,
    about=__doc__,
    table=(_COLUMNS, 1),
)


if __name__ == "__main__":
    sys.exit(main())

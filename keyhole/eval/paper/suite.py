"""The suite `paper` for one model: gate, plan, estimate, measurements and conclusions.

Nothing is measured on a model whose logits differ from those of transformers: `keyhole verify` runs
in full, once for a model on a machine and a version of Keyhole, and its line is stored with the
others.

A short timed probe gives an upper estimate of the time. Prompts and decode steps are assumed to
grow linearly with the tokens before them: the weights cost the same in every step, attention in
proportion to the keys. Every answer is assumed to reach its maximum length, every policy's step to
take as long as full attention's, and methods over stored documents to compute the whole prompt, as
`recompute` does.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache
from keyhole.engine.sequence import Sequence as Running
from keyhole.errors import ConfigError
from keyhole.eval.line_file import GATE, EvalOutcome, Line, LineFile
from keyhole.eval.paper.documents import DocumentEvaluation, DocumentGrid
from keyhole.eval.paper.verdicts import MethodVerdict, ReuseResult, policy_verdicts, reuse_results
from keyhole.eval.run import EvalGrid, Evaluation, Group, model_digest, release_engines
from keyhole.eval.suite import Header
from keyhole.eval.tasks import Sample, Task, token_counter
from keyhole.eval.verify import verify
from keyhole.eval.workload import Request, Workload
from keyhole.models.model import Model
from keyhole.policies import available_policies
from keyhole.policies.controls import Full

#: Prompt chunks from which the growth is estimated, if the prompt is long enough.
_CHUNKS = 4
#: Decode steps that are timed, after one untimed step.
_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class LinearTime:
    """A time in seconds that grows with the context: `base`, plus `slope` per token before it."""

    base: float
    slope: float

    @classmethod
    def through(cls, tokens: list[float], seconds: list[float]) -> LinearTime:
        """Least squares; neither base nor slope is negative."""
        slope = 0.0
        if len(set(tokens)) > 1:
            slope = max(0.0, float(np.polyfit(tokens, seconds, 1)[0]))
        base = float(np.mean(seconds)) - slope * float(np.mean(tokens))
        return cls(base=max(0.0, base), slope=slope)

    def at(self, tokens: float) -> float:
        """Seconds with a context of this many tokens."""
        return self.base + self.slope * tokens


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Times of a model. chunk_tokens: per prompt chunk; batch: sequences per decode step."""

    chunk_tokens: int
    chunk: LinearTime
    batch: int
    step: LinearTime

    def prefill(self, tokens: float) -> float:
        """Seconds for a prompt of this length."""
        chunks = math.ceil(tokens / self.chunk_tokens)
        # The contexts of the chunks are 0, 1, ... times as long as one.
        before = self.chunk_tokens * chunks * (chunks - 1) / 2
        share = tokens / (chunks * self.chunk_tokens)
        return share * (self.chunk.base * chunks + self.chunk.slope * before)

    def decode(self, tokens: float, new_tokens: float, samples: int) -> float:
        """Seconds to answer this many samples, a batch at a time."""
        rounds = math.ceil(samples / self.batch)
        return rounds * new_tokens * self.step.at(tokens + new_tokens / 2)


def probe(model: Model, length: int, batch: int) -> Speed:
    """Times a dense prompt of `length` tokens and then a few dense steps of `batch` sequences."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (length,), generator=generator).tolist()
    size = EngineConfig.page_size
    chunk = min(EngineConfig.prefill_chunk, max(size, length // _CHUNKS))
    config = EngineConfig(max_batch=batch, prefill_chunk=chunk)
    engine = Engine(model, Full(), config)
    long = tokens[: max(1, length - _STEPS - 2)]
    short = long[-chunk:]
    _steps(engine, short, batch)  # one-time work at first use
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
    """Tokens before each whole chunk of a prompt, and the seconds of the chunk."""
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
    """Median seconds of a decode step after this prompt, whose pages are shared."""
    first = _add(engine, tokens, 1)
    while not first.is_finished:
        engine.step()
    sequences = [_add(engine, tokens, _STEPS + 2) for _ in range(batch)]
    while any(one.num_generated < 1 for one in sequences):
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
    """The time in seconds, after the device has finished its work."""
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)
    return time.perf_counter()


def _add(engine: Engine, tokens: list[int], new_tokens: int) -> Running:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return engine.add(tokens, params)


@dataclass(frozen=True, kw_only=True)
class PartEstimate:
    """A part of the evaluation: its number of cells or questions, how many are stored, and the
    seconds for the rest.
    """

    name: str
    unit: str
    number: int
    stored: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Samples of one task and length. missing: number of policies that have yet to answer them."""

    request: Request
    samples: int
    missing: int

    @classmethod
    def of(cls, group: Group, missing: int) -> Answers:
        """From a group's first sample; the others are about as long."""
        request = group.workload.shown(group.length, group.setup).request
        return cls(request=request, samples=group.samples, missing=missing)

    def seconds(self, speed: Speed, shared_tokens: float) -> float:
        """shared_tokens: the most tokens of prompts that are computed once for all policies."""
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


def seconds_of_question(speed: Speed, sample: Sample, methods: int) -> float:
    """One question over documents that are stored first, under this many methods, one at a time."""
    documents = max(1, len(sample.documents))
    stored = documents * speed.prefill(sample.prompt_tokens / documents)
    answered = speed.prefill(sample.prompt_tokens) + sample.max_new_tokens * speed.step.at(
        sample.prompt_tokens
    )
    return stored + methods * answered


def estimate_text(parts: Sequence[PartEstimate]) -> str:
    """One line for people: what will be measured, what is stored, and how long the rest takes."""
    times = [
        f"{part.name}: {part.number:,} {part.unit}{'s' * (part.number != 1)}, "
        f"{part.stored:,} stored"
        + (f", the rest at most {duration(part.seconds)}" if part.stored < part.number else "")
        for part in parts
        if part.number
    ]
    left = sum(part.seconds for part in parts)
    return f"{'; '.join(times)}. Altogether at most about {duration(left)}."


def duration(seconds: float) -> str:
    """A duration for people: 40 s, 12 min, 3.5 h, 2.1 days."""
    for limit, size, unit in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"


#: RULER's shortest length; each further one is twice as long.
_SHORTEST = 4096
#: Policies that are themselves recency.
_RECENCY = ("sliding_window", "streaming_llm")
#: A task is skipped at a length if its texts fill less than this share of it.
_FILLED = 0.5


@dataclass(frozen=True, kw_only=True)
class PaperGrid(EvalGrid):
    """Cells of the tasks at the lengths that each of them can fill."""

    lengths_of: Mapping[Workload, tuple[int, ...]] = field(default_factory=dict)

    def groups(self) -> Iterator[Group]:
        """The groups of `EvalGrid` without lengths that are too short or too long for a task."""
        for workload in self.workloads:
            own = dataclasses.replace(
                self, workloads=(workload,), lengths=self.lengths_of[workload]
            )
            yield from super(PaperGrid, own).groups()


def default_lengths(model: Model) -> tuple[int, ...]:
    """4,096 tokens and each doubling that the model allows; for a shorter model, its maximum."""
    found, length = [], _SHORTEST
    while length <= model.max_length:
        found.append(length)
        length *= 2
    return tuple(found) or (model.max_length,)


def default_policies(model: Model) -> str:
    """Every method that this model can run, except recency, in the form of `--policies`."""
    return ",".join(
        name
        for name, cls in available_policies().items()
        if not (
            cls.dense
            or name in _RECENCY
            or (cls.wants_head and model.head is None)
            or (cls.wants_gate and model.gate is None)
        )
    )


def fitting_lengths(
    workloads: Sequence[Workload], lengths: Sequence[int], setup: str
) -> dict[Workload, tuple[int, ...]]:
    """The lengths that each task can fill; ConfigError if no task has one."""
    found = {one: tuple(n for n in lengths if _fills(one, n, setup)) for one in workloads}
    if not any(found.values()):
        raise ConfigError(
            f"no task has texts of {', '.join(map(str, lengths))} tokens; name others"
        )
    return found


def document_places(
    tasks: Sequence[Task], lengths: Sequence[int], model: Model
) -> tuple[list[tuple[Task, int]], list[str]]:
    """Every task at every length that is long enough for its documents; and, of each task with
    shorter ones, what the longest of these lacks.
    """
    count = token_counter(model.tokenizer)
    places: list[tuple[Task, int]] = []
    short: dict[str, str] = {}
    for task in tasks:
        for length in sorted(lengths):
            try:
                task.make(length, 0, count)
            except ConfigError as error:  # the length is too short for the task
                short[task.name] = str(error)
            else:
                places.append((task, length))
    return places, list(short.values())


def _fills(workload: Workload, length: int, setup: str) -> bool:
    try:
        workload.available(length, 1)
    except ConfigError:  # the length is too short for the task
        return False
    request = workload.shown(length, setup).request
    return len(request.prompt) + len(request.given) + request.max_tokens >= _FILLED * length


def gate(model: Model, file: LineFile, header: Callable[[], dict[str, Any]]) -> Line:
    """The line of the checks, from the file, or measured now and added to it; `why_not_evaluated`
    reads it.
    """
    about = header()
    known_by = {
        "benchmark": GATE,
        "fingerprint": model_digest(model),
        "commit": about["commit"],
        "versions": about["versions"],
        "device": about["machine"]["device"],
    }
    stored = file.find(known_by, 0)
    if stored is not None and why_not_evaluated(stored) is None:
        return stored
    checks = [asdict(check) | {"passed": check.passed} for check in verify(model)]
    file.add(about | known_by | {"model": model.name, "checks": checks})
    return file.lines[-1]


def why_not_evaluated(line: Line) -> str | None:
    """The reason not to evaluate the model; None if every check passed."""
    failed = [check for check in line["checks"] if not check["passed"]]
    if not failed:
        return None
    worst = max(failed, key=lambda check: float(check["error"]))
    return (
        f"{line['model']} does not reproduce the logits of transformers: {len(failed)} of "
        f"{len(line['checks'])} checks differ, the worst under {worst['policy']} "
        f"({worst['run']}): error {worst['error']:.1e}, allowed {worst['tolerance']:.1e}; "
        "see `keyhole verify`"
    )


@dataclass(frozen=True, kw_only=True)
class PaperOutcome:
    """The measurements, now or earlier, and the conclusions."""

    cells: EvalOutcome
    questions: EvalOutcome
    policies: list[MethodVerdict]
    reuses: list[ReuseResult]


class PaperSuite:
    """All cells of a grid and all questions over documents, in one file.

    copies: prompts that are computed once for all policies. ConfigError, before anything runs, for
    a length that the model or a task does not allow.
    """

    def __init__(
        self,
        model: Model,
        grid: PaperGrid,
        documents: DocumentGrid,
        file: LineFile,
        header: Header,
        copies: SharedPromptCache,
    ) -> None:
        self._model, self._grid, self._documents = model, grid, documents
        self._copies = copies
        self._cells = Evaluation(model, grid, file, header, copies)
        self._questions = DocumentEvaluation(model, documents, file, header)

    def estimate(self) -> list[PartEstimate]:
        """Cells and questions, how many are stored, and the maximum seconds for the rest.

        Runs the probe unless everything is stored.
        """
        groups = self._cells.missing()
        places = [
            (task, length, self._questions.missing(task, length))
            for task, length in self._documents.places
        ]
        cells, cells_left = sum(n for _, n, _ in groups), sum(n for _, _, n in groups)
        asked, asked_left = len(places) * self._documents.samples, sum(n for _, _, n in places)
        cell_seconds = question_seconds = 0.0
        if cells_left or asked_left:
            release_engines(self._model)
            config = self._grid.config
            speed = probe(self._model, min(self._grid.lengths), config.max_batch)
            shared = self._copies.limit / self._model.geometry(config.page_size).token_bytes
            for group, _, left in groups:
                cell_seconds += Answers.of(group, left).seconds(speed, shared)
            for task, length, left in places:
                question = self._questions.sample(task, length)
                each = seconds_of_question(speed, question, len(self._documents.methods))
                question_seconds += left * each
        return [
            PartEstimate(
                name="tasks",
                unit="cell",
                number=cells,
                stored=cells - cells_left,
                seconds=cell_seconds,
            ),
            PartEstimate(
                name="documents",
                unit="question",
                number=asked,
                stored=asked - asked_left,
                seconds=question_seconds,
            ),
        ]

    def run(self) -> PaperOutcome:
        """Measures what the file lacks; each line is stored as soon as it is measured."""
        release_engines(self._model)
        cells = self._cells.run()
        self._copies.begin(None)  # the prompts of the last group are no longer needed
        release_engines(self._model)
        questions = self._questions.run()
        page_size = self._grid.config.page_size
        return PaperOutcome(
            cells=cells,
            questions=questions,
            policies=policy_verdicts(cells.lines, cells.refused, self._grid.methods, page_size),
            reuses=reuse_results(questions.lines, self._documents.methods),
        )

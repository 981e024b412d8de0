"""The suite `paper` over one model: gate, plan, estimate, measurements and conclusions.

Nothing is measured on a model whose logits differ from transformers': `keyhole verify` runs in
full, once for a model on a machine and a version of Keyhole, and its line is stored with the
others.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from keyhole.engine.shared_prompt_cache import SharedPromptCache
from keyhole.errors import ConfigError
from keyhole.eval.line_file import GATE, Line, LineFile
from keyhole.eval.paper import estimate
from keyhole.eval.paper.documents import DocumentEvaluation, DocumentGrid, DocumentOutcome
from keyhole.eval.paper.estimate import Answers, PartEstimate, Speed, probe
from keyhole.eval.paper.verdicts import MethodVerdict, ReuseResult, policy_verdicts, reuse_results
from keyhole.eval.run import EvalGrid, EvalOutcome, Evaluation, Group, model_digest
from keyhole.eval.tasks import CountTokens, Task, token_counter
from keyhole.eval.verify import verify
from keyhole.eval.workload import Workload
from keyhole.models.loading import Model
from keyhole.policies import available_policies

#: RULER's shortest length; each further one is twice as long.
_SHORTEST = 4096
#: Policies that are the recent control themselves.
_RECENCY = ("sliding_window", "streaming_llm")
#: A task whose texts cannot grow is not asked at lengths of which it fills less than this share.
_FILLED = 0.5


@dataclass(frozen=True, kw_only=True)
class PaperGrid(EvalGrid):
    """Cells of the tasks at the lengths that each of them can fill."""

    lengths_of: Mapping[Workload, tuple[int, ...]] = field(default_factory=dict)

    def groups(self) -> Iterator[Group]:
        """As any grid's, without lengths that are too short or too long for a task."""
        for workload in self.workloads:
            own = dataclasses.replace(
                self, workloads=(workload,), lengths=self.lengths_of[workload]
            )
            yield from super(PaperGrid, own).groups()


def default_lengths(model: Model) -> tuple[int, ...]:
    """4,096 tokens and each double of it that the model takes; of a shorter model all it takes."""
    found, length = [], _SHORTEST
    while length <= model.max_length:
        found.append(length)
        length *= 2
    return tuple(found) or (model.max_length,)


def default_policies(model: Model) -> str:
    """Every method that this model can have, recency aside, as `--policies` takes them."""
    return ",".join(
        name
        for name, cls in available_policies().items()
        if not (cls.dense or name in _RECENCY or (cls.wants_head and model.head is None))
    )


def fitting_lengths(
    workloads: Sequence[Workload], lengths: Sequence[int], setup: str
) -> dict[Workload, tuple[int, ...]]:
    """By task the lengths that it can fill; ConfigError if there is no task with such a length."""
    found = {one: tuple(n for n in lengths if _fills(one, n, setup)) for one in workloads}
    if not any(found.values()):
        raise ConfigError(
            f"no task has texts of {', '.join(map(str, lengths))} tokens; name others"
        )
    return found


def document_places(
    tasks: Sequence[Task], lengths: Sequence[int], model: Model
) -> list[tuple[Task, int]]:
    """Every task at every length that is long enough for its documents."""
    count = token_counter(model.tokenizer)
    return [(task, n) for task in tasks for n in lengths if _fits(task, n, count)]


def _fits(task: Task, length: int, count: CountTokens) -> bool:
    try:
        task.make(length, 0, count)
    except ConfigError:  # too short for it
        return False
    return True


def _fills(workload: Workload, length: int, setup: str) -> bool:
    try:
        workload.available(length, 1)
    except ConfigError:  # too short for it
        return False
    request = workload.shown(length, setup).request
    return len(request.prompt) + len(request.given) + request.max_tokens >= _FILLED * length


def gate(model: Model, file: LineFile, header: Callable[[], dict[str, Any]]) -> Line:
    """The line of the checks, from the file or run now and added to it; see `reason`."""
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
    """Why the model is not evaluated; None if every check passed."""
    failed = [check for check in line["checks"] if not check["passed"]]
    if not failed:
        return None
    worst = max(failed, key=lambda check: float(check["error"]))
    return (
        f"{line['model']} does not give the logits of transformers: {len(failed)} of "
        f"{len(line['checks'])} checks differ, the worst under {worst['policy']} "
        f"({worst['run']}): error {worst['error']:.1e}, allowed {worst['tolerance']:.1e}; "
        "see `keyhole verify`"
    )


#: How, where and when: the fields of a line that say so.
Header = Callable[[], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PaperOutcome:
    """What was measured, now or before, and what follows from it."""

    cells: EvalOutcome
    questions: DocumentOutcome
    policies: list[MethodVerdict]
    reuses: list[ReuseResult]


class PaperSuite:
    """All cells of a grid and all questions over documents, in one file.

    copies: prompts that are computed once for all policies. ConfigError, before anything runs, for
    a length that the model or a task cannot have.
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
        """Cells and questions, how many are stored, and the seconds that the others take at most.

        Runs the probe, unless everything is stored.
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
            speed = self._probe()
            for group, _, left in groups:
                answers = Answers.of(group, left)
                cell_seconds += answers.seconds(speed, self._shared_tokens())
            for task, length, left in places:
                question = self._questions.sample(task, length)
                each = estimate.question_seconds(speed, question, len(self._documents.methods))
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
        """Measures what the file lacks; each line is stored as soon as it is there."""
        self._free()
        cells = self._cells.run()
        self._copies.begin(None)  # the prompts of the last group are not needed any more
        self._free()
        questions = self._questions.run()
        page_size = self._grid.config.page_size
        return PaperOutcome(
            cells=cells,
            questions=questions,
            policies=policy_verdicts(cells.lines, cells.refused, self._grid.methods, page_size),
            reuses=reuse_results(questions.lines, self._documents.methods),
        )

    def _free(self) -> None:
        """The next engine takes what memory is free when it is made."""
        gc.collect()  # engine and scheduler know each other
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _probe(self) -> Speed:
        self._free()
        return probe(self._model, min(self._grid.lengths), self._grid.config.max_batch)

    def _shared_tokens(self) -> float:
        geometry = self._model.geometry(self._grid.config.page_size)
        return self._copies.limit / geometry.token_bytes

"""The suite over one model: estimates what is missing, measures it, and concludes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from keyhole.engine.shared_prompt_cache import SharedPromptCache
from keyhole.eval.paper import estimate
from keyhole.eval.paper.documents import DocumentEvaluation, DocumentGrid, DocumentOutcome
from keyhole.eval.paper.estimate import Answers, PartEstimate
from keyhole.eval.paper.plan import PaperGrid
from keyhole.eval.paper.policy_verdicts import MethodVerdict, policy_verdicts
from keyhole.eval.paper.reuse_verdicts import ReuseResult, reuse_results
from keyhole.eval.paper.speed import Speed, probe
from keyhole.eval.results.line_file import LineFile
from keyhole.eval.run import EvalOutcome, Evaluation
from keyhole.models.loading import Model

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

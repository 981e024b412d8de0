"""Questions over stored documents under every reuse method: one line for each question.

The documents of a question are encoded and stored one by one, then every method answers it from the
store. `recompute`, which computes the whole prompt as if nothing were stored, is the reference.
`no_documents`, the question alone, is the control: a method that is no better gains nothing from
what it keeps.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.sequence import Result
from keyhole.errors import ConfigError, KeyholeError
from keyhole.eval.line_file import QUESTIONS, EvalOutcome, Line, LineFile
from keyhole.eval.run import as_stored, model_digest, require_length
from keyhole.eval.tasks import TINY, Sample, Task, token_counter
from keyhole.eval.tasks.base import exact_match, token_f1
from keyhole.llm import LLM
from keyhole.models.model import Model
from keyhole.reuse import available_reuse_methods, make_reuse

#: The word that ends an answer of the bundled model.
_END = "done"


@dataclass(frozen=True, kw_only=True)
class DocumentQuestion:
    """The parts from which `LLM.ask` builds a prompt.

    names: of the documents, unique over all samples, so that one store can hold many.
    """

    prefix: str
    names: tuple[str, ...]
    documents: tuple[str, ...]
    separator: str
    question: str


def question_of(sample: Sample) -> DocumentQuestion:
    """The parts of a sample; joined, they are its prompt.

    ConfigError for a sample whose context is not documents with the same separator between them.
    """
    edges, end = [], 0
    for document in sample.documents:
        start = sample.context.find(document, end)
        edges.append((start, end))
        end = start + len(document)
    between = {sample.context[before:start] for start, before in edges[1:]}
    if not edges or any(start < 0 for start, _ in edges) or len(between) > 1:
        raise ConfigError(
            f"task {sample.task} cannot use stored documents: its context is not documents "
            "with the same separator between them"
        )
    place = f"{sample.task}-{sample.length}-{sample.seed}"
    return DocumentQuestion(
        prefix=sample.context[: edges[0][0]],
        names=tuple(f"{place}/{number}" for number in range(1, len(edges) + 1)),
        documents=sample.documents,
        separator=between.pop() if between else "",
        question=f"{sample.context[end:]}{sample.question}{sample.answer_prefix}",
    )


def scores(task: Task, sample: Sample, generated: str) -> dict[str, float]:
    """Token F1, exact match, and the task's own score, each from 0 to 1.

    F1 and exact match are SQuAD's, computed on the first line of the answer; for the bundled model,
    on the words before the word that ends an answer.
    """
    if task.text == TINY:
        answer, right = (
            generated.partition(_END)[0],
            [text.partition(_END)[0] for text in sample.answers],
        )
    else:
        answer, right = generated.strip().partition("\n")[0], list(sample.answers)
    return {
        "f1": token_f1(right, answer),
        "exact": exact_match(right, answer),
        "score": task.score(sample, generated),
    }


#: The control that reads no document.
NO_DOCUMENTS = "no_documents"


@dataclass(frozen=True, kw_only=True)
class DocumentGrid:
    """`samples` questions at every place, which is a task and the total length of its documents in
    tokens.

    first_seed: number of the first question. methods: reuse methods by name; `NO_DOCUMENTS` is
    added.
    """

    places: Sequence[tuple[Task, int]]
    samples: int
    first_seed: int = 0
    methods: Sequence[str] = field(default_factory=lambda: tuple(available_reuse_methods()))

    @property
    def seeds(self) -> range:
        """Numbers of the questions at a place."""
        return range(self.first_seed, self.first_seed + self.samples)


class DocumentEvaluation:
    """A grid of questions for a model with a tokenizer, and the file of their lines.

    header: makes the fields of a line for how, where and when. ConfigError, before anything runs,
    for a length that the model or a task does not allow.
    """

    def __init__(
        self,
        model: Model,
        grid: DocumentGrid,
        file: LineFile,
        header: Callable[[], dict[str, Any]],
    ) -> None:
        self._model, self._grid, self._file, self._header = model, grid, file, header
        self._count = token_counter(model.tokenizer)
        geometry = model.geometry(EngineConfig.page_size)
        self._methods = {name: make_reuse(name).resolve(geometry) for name in grid.methods}
        self._settings = {
            name: as_stored(dataclasses.asdict(method)) for name, method in self._methods.items()
        } | {NO_DOCUMENTS: {}}
        self._digest = model_digest(model)
        for task, length in grid.places:
            require_length(model, length)
            question_of(self.sample(task, length))
        self._found = self._index()

    def sample(self, task: Task, length: int, seed: int | None = None) -> Sample:
        """Question number `seed`; None: the first one."""
        return task.make(length, self._grid.first_seed if seed is None else seed, self._count)

    def missing(self, task: Task, length: int) -> int:
        """Number of questions at a place that lack an answer under some method."""
        return sum(bool(self._lacking(task, length, seed)) for seed in self._grid.seeds)

    def run(self) -> EvalOutcome:
        """Asks the questions that the file lacks, and adds a line for each."""
        asked = EvalOutcome()
        total = len(self._grid.places) * self._grid.samples
        with (
            tempfile.TemporaryDirectory() as folder,
            tqdm(total=total, unit="question", disable=None) as bar,
        ):
            llm = LLM(self._model, prefix_cache=False, documents=folder)
            for task, length in self._grid.places:
                bar.set_description(f"documents {task.name} {length}")
                refused: dict[str, str] = {}
                for seed in self._grid.seeds:
                    asked.stored += not self._lacking(task, length, seed)
                    self._question(llm, task, length, seed, refused)
                    asked.lines += self._lines(task, length, seed)
                    bar.update()
                asked.refused += [
                    {"task": task.name, "length": length, "method": name, "error": error}
                    for name, error in refused.items()
                ]
        return asked

    def _question(
        self, llm: LLM, task: Task, length: int, seed: int, refused: dict[str, str]
    ) -> None:
        """Asks one question under the methods that it lacks, and stores a line; changes `refused`
        in place.
        """
        missing = [name for name in self._lacking(task, length, seed) if name not in refused]
        if not missing:
            return
        sample = self.sample(task, length, seed)
        asked = question_of(sample)
        # The first method runs with cold caches, so the methods take turns at being first.
        turn = seed % len(missing)
        results: dict[str, Any] = {}
        added: list[str] = []
        try:
            for name, text in zip(asked.names, asked.documents, strict=True):
                llm.documents.add(name, text)
                added.append(name)
            for name in [*missing[turn:], *missing[:turn]]:
                try:
                    result = self._answer(llm, name, sample, asked)
                except KeyholeError as error:
                    refused[name] = str(error)
                    continue
                results[name] = self._fields(name, result) | scores(task, sample, result.text)
        except KeyholeError as error:  # a document cannot be stored, so no method can answer
            refused.update(dict.fromkeys(missing, str(error)))
        finally:
            for name in added:
                llm.documents.remove(name)
        if results:
            line = self._header() | self._place(task, length, seed)
            line |= {"model": self._model.name, "documents": len(asked.documents)}
            self._file.add(line | {"results": results})
            self._found.setdefault(_key(line), []).append(self._file.lines[-1])

    def _answer(self, llm: LLM, name: str, sample: Sample, asked: DocumentQuestion) -> Result:
        params = SamplingParams(
            max_tokens=sample.max_new_tokens, temperature=0.0, repetition_penalty=1.0
        )
        if name == NO_DOCUMENTS:
            return llm.generate(f"{asked.prefix}{asked.question}", params)
        return llm.ask(
            asked.question,
            list(asked.names),
            reuse=self._methods[name],
            prefix=asked.prefix,
            separator=asked.separator,
            params=params,
        )

    def _fields(self, name: str, result: Result) -> dict[str, Any]:
        """The costs of a method's answer; if the whole prompt is computed, everything counts as
        kept and recomputed.
        """
        stats, whole = result.stats, 0.0 if name == NO_DOCUMENTS else 1.0
        ratios = stats.sequence_ratio, stats.recompute_ratio
        return {
            "settings": self._settings[name],
            "answer": result.text,
            "sequence_ratio": whole if ratios[0] is None else ratios[0],
            "recompute_ratio": whole if ratios[1] is None else ratios[1],
            "ttft_ms": stats.ttft_ms,
            "bytes_read": stats.store_bytes_read or 0,
            "tokens_prompt": stats.prompt_tokens,
        }

    def _place(self, task: Task, length: int, seed: int) -> dict[str, Any]:
        """The fields that identify a question."""
        return {
            "benchmark": QUESTIONS,
            "fingerprint": self._digest,
            "task": task.name,
            "task_settings": as_stored(task.settings),
            "length": length,
            "seed": seed,
        }

    def _index(self) -> dict[str, list[Line]]:
        """The lines of questions in the file, by the fields that identify them."""
        found: dict[str, list[Line]] = {}
        for line in self._file.lines:
            if line.get("benchmark") == QUESTIONS:
                found.setdefault(_key(line), []).append(line)
        return found

    def _lines(self, task: Task, length: int, seed: int) -> list[Line]:
        return self._found.get(_key(self._place(task, length, seed)), [])

    def _lacking(self, task: Task, length: int, seed: int) -> list[str]:
        """Methods that no stored line of the question has with these settings."""
        lines = self._lines(task, length, seed)
        return [
            name
            for name, settings in self._settings.items()
            if not any(line["results"].get(name, {}).get("settings") == settings for line in lines)
        ]


_KNOWN_BY = ("fingerprint", "task", "task_settings", "length", "seed")


def _key(line: Mapping[str, Any]) -> str:
    return json.dumps([line.get(name) for name in _KNOWN_BY], sort_keys=True)

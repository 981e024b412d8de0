"""A task's sample as a question over stored documents, and how right an answer is."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.errors import ConfigError
from keyhole.eval.tasks import TINY, Sample, Task
from keyhole.eval.tasks.common.scores import exact_match, token_f1

#: The word that ends an answer of the bundled model.
_END = "done"


@dataclass(frozen=True, kw_only=True)
class DocumentQuestion:
    """The pieces that `LLM.ask` makes a prompt of.

    names: of the documents, unique over all samples, so that one store can hold many.
    """

    prefix: str
    names: tuple[str, ...]
    documents: tuple[str, ...]
    separator: str
    question: str


def question_of(sample: Sample) -> DocumentQuestion:
    """The sample in pieces; joined, they are its prompt.

    ConfigError for a sample whose context is not documents with the same text between them.
    """
    edges, end = [], 0
    for document in sample.documents:
        start = sample.context.find(document, end)
        edges.append((start, end))
        end = start + len(document)
    between = {sample.context[before:start] for start, before in edges[1:]}
    if not edges or any(start < 0 for start, _ in edges) or len(between) > 1:
        raise ConfigError(
            f"task {sample.task} cannot be asked of stored documents: its text is not documents "
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

    F1 and exact match are SQuAD's, of the first line that was written; for the words of the bundled
    model, of what stands before the word that ends an answer.
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

"""Samples split into documents, and the score of an answer."""

from __future__ import annotations

import dataclasses

import pytest

from keyhole.errors import ConfigError
from keyhole.eval.paper.documents import question_of, scores
from keyhole.eval.tasks import Sample, make_task

PLAIN = make_task("multi_document_1")
TINY = make_task("tiny_documents_one")


def count(text: str) -> int:
    return len(text.split())


def sample(answers: tuple[str, ...]) -> Sample:
    return Sample(
        task="any",
        length=1,
        seed=0,
        context="",
        question="",
        answers=answers,
        max_new_tokens=1,
        prompt_tokens=1,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "name",
    [
        "multi_document_1",
        "multi_document_2",
        "qa_1",
        "qa_2",
        "tiny_documents_one",
        "tiny_documents_two_hop",
        "tiny_documents_needs_each_other",
    ],
)
def test_the_pieces_joined_are_the_prompt(name: str, seed: int) -> None:
    made = make_task(name).make(1400, seed, count)
    asked = question_of(made)
    joined = f"{asked.prefix}{asked.separator.join(asked.documents)}{asked.question}"
    assert joined == made.prompt
    assert asked.documents == made.documents
    assert len(set(asked.names)) == len(asked.documents) > 1


def test_names_differ_from_question_to_question() -> None:
    names = [
        name
        for length in (1400, 1500)
        for seed in range(3)
        for name in question_of(PLAIN.make(length, seed, count)).names
    ]
    assert len(set(names)) == len(names)


def test_a_task_without_documents_cannot_be_asked_of_a_store() -> None:
    with pytest.raises(ConfigError, match="task passkey cannot use stored documents"):
        question_of(make_task("passkey").make(1400, 0, count))
    made = PLAIN.make(1400, 0, count)
    uneven = dataclasses.replace(made, context=made.context.replace("Document 2", ";Document 2"))
    with pytest.raises(ConfigError, match="the same separator"):
        question_of(uneven)


@pytest.mark.parametrize(
    ("generated", "f1", "exact"),
    [
        (" The Oder\nQuestion: more", 1, 1),
        ("oder.", 1, 1),
        (" river Oder", 2 / 3, 0),
        (" Elbe", 0, 0),
        ("", 0, 0),
    ],
)
def test_plain_answers_are_scored_as_squad_does(generated: str, f1: float, exact: float) -> None:
    found = scores(PLAIN, sample(("Oder",)), generated)
    assert (found["f1"], found["exact"]) == (pytest.approx(f1), exact)
    assert found["score"] == found["f1"]


@pytest.mark.parametrize(
    ("generated", "f1", "exact", "score"),
    [
        ("Ann keeps 12 . done and more", 1, 1, 1),
        ("Ann keeps 13 . done", 2 / 3, 0, 0),
        ("Ann keeps 12 .", 1, 1, 0),
    ],
)
def test_answers_of_the_bundled_model_end_before_done(
    generated: str, f1: float, exact: float, score: float
) -> None:
    found = scores(TINY, sample(("Ann keeps 12 . done",)), generated)
    assert found == {"f1": pytest.approx(f1), "exact": exact, "score": score}

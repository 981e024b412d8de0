"""Rows of the bundled model's world: a text with many questions and answers behind it.

The bundled model was trained on such rows, and `keyhole train-head` trains its retrieval head on
them. A row is worth its computation only where something is supervised, so a context is followed by
as many questions as fit. Only the words of answers are supervised.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from random import Random

from keyhole.eval.tiny_language.tasks import derive, walk
from keyhole.eval.tiny_language.world import (
    BOS,
    EOS,
    QUESTIONS,
    WORD_IDS,
    World,
    framed,
    is_possible,
    write_world,
)

Row = tuple[list[str], list[bool]]
"""Words, and for each whether the model is to predict it."""

LONGEST_WALK = 2048
"""Row length beyond which a walk has no more names to fill the row."""

_QUESTION_WEIGHTS = {
    "recall": 1.0,
    "multiquery": 1.5,
    "multivalue": 1.0,
    "hops": 1.5,
    "vartrack": 1.5,
    "reference": 2.0,
    "count": 1.5,
    "majority": 1.0,
}


def append_words(row: Row, words: Sequence[str], supervised: bool) -> None:
    """Adds words to a row in place; supervised: whether the model is to predict them."""
    row[0].extend(words)
    row[1].extend([supervised] * len(words))


def walk_row(rng: Random, length: int) -> Row:
    """Write one walk with its answer."""
    return _program_row(walk(rng, length - 4))


def derive_row(rng: Random, length: int) -> Row:
    """Write one derivation with its answer."""
    return _program_row(derive(rng, length - 4))


def _program_row(program: tuple[list[str], list[str], list[str]]) -> Row:
    context, question, answer = program
    row: Row = ([BOS], [False])
    append_words(row, [*context, *question], False)
    append_words(row, [*answer, "done", EOS], True)
    return row


def questions_row(rng: Random, length: int) -> Row:
    """Write a world and ask about it until the row is full."""
    world = _some_world(rng, int(length * rng.uniform(0.45, 0.75)))
    row: Row = ([BOS], [False])
    append_words(row, world.words, False)
    kinds = [kind for kind in QUESTIONS if is_possible(kind, world)]
    weights = [_QUESTION_WEIGHTS[kind] for kind in kinds]
    while True:
        kind = rng.choices(kinds, weights)[0]
        question, answer = QUESTIONS[kind](world, rng)
        frame = framed(question)
        if len(row[0]) + len(frame) + len(answer) + 2 > length:
            return row
        append_words(row, frame, False)
        append_words(row, [*answer, "done", EOS], True)


def _some_world(rng: Random, length: int) -> World:
    features = [name for name in ("chains", "likes", "references") if rng.random() < 0.5]
    if length < 128:  # too little room for more than one
        features = [rng.choice(("chains", "likes", "references"))]
    documents = 0
    if length >= 96 and rng.random() < 0.5:
        documents = rng.randint(2, max(2, min(16, length // 48)))
    density = rng.choice((0.15, 0.3, 0.6, 1.0)) if length >= 192 else rng.choice((0.6, 1.0))
    return write_world(rng, length, density=density, num_documents=documents, features=features)


ROWS: dict[str, Callable[[Random, int], Row]] = {
    "questions": questions_row,
    "walk": walk_row,
    "derive": derive_row,
}


_WEIGHTS = {"questions": 3.0, "walk": 1.5, "derive": 3.0}
"""What is written by the model in long generations counts most; `stream` is no task of anyone."""


class HeadTexts:
    """A corpus for `keyhole train-head` whose items are those of no evaluation.

    Every text is a prompt and an answer that takes about its second half.
    """

    name = "the bundled model's texts"
    digest = hashlib.sha256(json.dumps(_WEIGHTS).encode()).hexdigest()
    """Of the mixture; how texts are written changes with Keyhole's version only."""

    def text(self, rng: Random, length: int) -> list[int]:
        """Token ids of one row of at most `length` words, at least 96."""
        kinds = [kind for kind in _WEIGHTS if kind != "walk" or length <= LONGEST_WALK]
        kind = rng.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
        words, _ = ROWS[kind](rng, length)
        return [WORD_IDS[word] for word in words]

"""Training rows: a text with many questions and answers behind it, cut to a fixed length.

A row is worth its computation only where something is supervised, so a context is followed by as
many questions as fit. Only the words of answers are supervised; the rest is there to be read.
"""

from collections.abc import Callable, Sequence
from random import Random

from keyhole.eval.tiny_language.programs import derive, walk
from keyhole.eval.tiny_language.questions import QUESTIONS, framed, is_possible
from keyhole.eval.tiny_language.vocabulary import BOS, EOS, NAMES, NUMBERS, OBJECTS, PLACES
from keyhole.eval.tiny_language.world import World, write_world

Row = tuple[list[str], list[bool]]
"""Words, and for each whether the model is to predict it."""

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


def _append(row: Row, words: Sequence[str], supervised: bool) -> None:
    row[0].extend(words)
    row[1].extend([supervised] * len(words))


def stream_row(rng: Random, length: int) -> Row:
    """Write facts of which about half restate an earlier one; its value is to be predicted.

    The plainest form of the look-up, from which the model takes off within a million words.
    """
    row: Row = ([BOS], [False])
    known: list[tuple[str, str, str]] = []
    names = rng.sample(NAMES, min(len(NAMES), max(4, length // 8)))
    values = {"keeps": NUMBERS, "owns": OBJECTS, "inhabits": PLACES, "serves": NAMES}
    repeat = rng.uniform(0.4, 0.7)
    while len(row[0]) + 4 <= length:
        if known and rng.random() < repeat:
            entity, verb, value = rng.choice(known)
            again = True
        else:
            entity, verb = rng.choice(names), rng.choice(list(values))
            old = [fact for fact in known if fact[:2] == (entity, verb)]
            value = old[0][2] if old else rng.choice(values[verb])
            again = bool(old)
        known.append((entity, verb, value))
        _append(row, [entity, verb], False)
        _append(row, [value], again)
        _append(row, ["."], False)
    return row


def walk_row(rng: Random, length: int) -> Row:
    """Write one walk with its answer."""
    return _program_row(walk(rng, length - 4))


def derive_row(rng: Random, length: int) -> Row:
    """Write one derivation with its answer."""
    return _program_row(derive(rng, length - 4))


def _program_row(program: tuple[list[str], list[str], list[str]]) -> Row:
    context, question, answer = program
    row: Row = ([BOS], [False])
    _append(row, [*context, *question], False)
    _append(row, [*answer, "done", EOS], True)
    return row


def questions_row(rng: Random, length: int) -> Row:
    """Write a world and ask about it until the row is full."""
    world = _some_world(rng, int(length * rng.uniform(0.45, 0.75)))
    row: Row = ([BOS], [False])
    _append(row, world.words, False)
    kinds = [kind for kind in QUESTIONS if is_possible(kind, world)]
    weights = [_QUESTION_WEIGHTS[kind] for kind in kinds]
    while True:
        kind = rng.choices(kinds, weights)[0]
        question, answer = QUESTIONS[kind](world, rng)
        frame = framed(question)
        if len(row[0]) + len(frame) + len(answer) + 2 > length:
            return row
        _append(row, frame, False)
        _append(row, [*answer, "done", EOS], True)


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
    "stream": stream_row,
    "questions": questions_row,
    "walk": walk_row,
    "derive": derive_row,
}

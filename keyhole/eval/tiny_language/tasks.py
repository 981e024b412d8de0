"""The bundled model's tasks and texts: items with fixed seeds, and rows for training.

recall      one fact from a text that is mostly filler
multikey    one fact from a text of nothing but facts
multiquery  four facts
multivalue  all attributes of one entity
vartrack    a chain of equal names, to its number
docs1       one fact from several documents
docs2       two or three hops across documents
reference   a fact that one document states by pointing to an earlier document
count       how many facts of a kind there are (needs all of them in one step)
majority    what an entity likes most often (needs most of them in one step)
direct      two or three hops in one step: the answer states the last value alone
walk        a long chain of shuffled rules, written out
derive      a long shuffled program, carried out; its steps need earlier generated results
walk2       around a ring of names, two rules a step: the name between is not written
walk3       the same, three rules a step

Each written step of a walk or a derivation needs a fact of the prompt; a step of a derivation also
needs the result of a random *earlier generated* step, so forgetting what was written is as fatal as
forgetting the prompt.

A row is a text with as many questions and answers behind it as fit, of which the words of answers
are supervised. The bundled model was trained on rows, and `keyhole train-head` trains its retrieval
head on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from keyhole.eval.tiny_language.world import (
    BOS,
    EOS,
    FILLERS,
    HOPS,
    NAMES,
    QUESTIONS,
    STEPS,
    WORD_IDS,
    World,
    framed,
    is_possible,
    write_world,
)

Program = tuple[list[str], list[str], list[str]]
"""Words of the context, of the question with its frame, and of the answer without its end."""


def walk(rng: Random, length: int) -> Program:
    """Write a chain of names in random order and follow its last two thirds to the end.

    Prompt and answer together have at most `length` words.
    """
    rules = max(2, min(300, (length - 11) * 3 // 20))
    chain = rng.sample(NAMES, rules)
    # The other rules are distractors: no step can be guessed by elimination.
    start = rules // 3
    facts = [
        [name, "follows", following, "."]
        for name, following in zip(chain, [*chain[1:], "nobody"], strict=True)
    ]
    answer = [word for fact in facts[start:] for word in fact]
    rng.shuffle(facts)
    context = ["rules", ":", *(word for fact in facts for word in fact)]
    return context, ["walk", ":", chain[start], "?", "answer", ":"], answer


def walk2(rng: Random, length: int) -> Program:
    """Go around a ring of names by two rules a step: the one between is not named."""
    return _ring(rng, length, 2)


def walk3(rng: Random, length: int) -> Program:
    """Go around a ring of names by three rules a step."""
    return _ring(rng, length, 3)


def _ring(rng: Random, length: int, hops: int) -> Program:
    """Write a ring of names in random order and go around it until every name has been reached.

    The size of the ring is not a multiple of `hops`, so no name comes twice. Texts with room for
    more rules than there are names have filler between the rules.
    """
    rules = max(hops + 2, min(300, (length - 12) // 8))
    rules -= rules % hops == 0
    ring = rng.sample(NAMES, rules)
    sentences = [
        [name, "follows", following, "."]
        for name, following in zip(ring, [*ring[1:], ring[0]], strict=True)
    ]
    answer = [
        word
        for step in range(rules)
        for word in (ring[step * hops % rules], HOPS[hops], ring[(step + 1) * hops % rules], ".")
    ]
    room = length - 12 - 8 * rules
    while room >= 4:
        size = min(rng.randint(3, 7), room - 1)
        sentences.append([*rng.choices(FILLERS, k=size), "."])
        room -= size + 1
    rng.shuffle(sentences)
    context = ["rules", ":", *(word for sentence in sentences for word in sentence)]
    return context, ["walk", ":", ring[0], HOPS[hops], "?", "answer", ":"], answer


def derive(rng: Random, length: int) -> Program:
    """Write a program of sums in random order and carry out all its steps.

    Step k takes the result of a random earlier step and adds 1, 2 or 3, modulo 10: small enough
    for a lucky reader to be partly right while it learns. At most `length` words in all.
    """
    steps = max(1, min(len(STEPS) - 1, (length - 16) // 24))
    first = rng.randrange(len(STEPS) - steps)
    names = STEPS[first : first + steps + 1]
    values = [0]
    facts = [[names[0], "is", "0", "."]]
    answer: list[str] = []
    for step in range(1, steps + 1):
        earlier, more = rng.randrange(step), rng.randint(1, 3)
        values.append((values[earlier] + more) % 10)
        takes = [names[step], "takes", names[earlier], "."]
        adds = [names[step], "adds", str(more), "."]
        facts += [takes, adds]
        answer += [*takes, *adds, names[earlier], "is", str(values[earlier]), "."]
        answer += [names[step], "is", str(values[step]), "."]
    rng.shuffle(facts)
    context = ["program", ":", *(word for fact in facts for word in fact)]
    question = ["question", ":", names[1], "all", names[-1], "?", "answer", ":"]
    return context, question, answer


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question with its answer; all texts are words separated by single spaces."""

    task: str
    context: str
    """What there is to read before the question; a prefix that questions can share."""
    question: str
    """`question : ... answer :`"""
    answer: str
    """What the model should write, ending in `done`; the model ends it with `<eos>`."""
    length: int
    """Words asked for; prompt and answer together have at most this many."""
    documents: tuple[str, ...] = ()
    """The context, document by document; empty where there are none."""

    @property
    def prompt(self) -> str:
        """The text up to and including `answer :`."""
        return f"{self.context} {self.question}"


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """The kind of question, and the kind of text."""

    question: str
    density: float = 0.3
    documents: bool = False
    features: tuple[str, ...] = ()


_RECIPES = {
    "recall": _Recipe(question="recall"),
    "multikey": _Recipe(question="recall", density=1.0),
    "multiquery": _Recipe(question="multiquery"),
    "multivalue": _Recipe(question="multivalue"),
    "vartrack": _Recipe(question="vartrack", features=("chains",)),
    "docs1": _Recipe(question="recall", documents=True),
    "docs2": _Recipe(question="hops", documents=True),
    "reference": _Recipe(question="reference", documents=True, features=("references",)),
    "count": _Recipe(question="count", features=("likes",)),
    "majority": _Recipe(question="majority", features=("likes",)),
    "direct": _Recipe(question="direct"),
}
_PROGRAMS = {"walk": walk, "derive": derive, "walk2": walk2, "walk3": walk3}

TASKS: tuple[str, ...] = (*_RECIPES, *_PROGRAMS)
HOP_TASKS = ("direct", "walk2", "walk3")
"""Tasks of which a step needs several facts one after the other; "tiny" did not learn them."""
_ROOM = 40
"""Words kept free for the frame and the longest answer of a question (multiquery: 35)."""


def num_documents(length: int) -> int:
    """Give the number of documents into which a text of `length` words is cut."""
    return max(2, min(16, length // 128))


def _item(
    task: str, program: Program, length: int, documents: Sequence[Sequence[str]] = ()
) -> Item:
    context, question, answer = program
    return Item(
        task=task,
        context=" ".join(context),
        question=" ".join(question),
        answer=" ".join([*answer, "done"]),
        length=length,
        documents=tuple(map(" ".join, documents)),
    )


def _asked(kind: str, world: World, rng: Random) -> Program:
    question, answer = QUESTIONS[kind](world, rng)
    return world.words, framed(question), answer


def make(task: str, length: int, seed: int) -> Item:
    """Item number `seed` of a task; the same three arguments give the same item.

    Raises ValueError for an unknown task and for a length below 96 words.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; one of {', '.join(TASKS)}")
    if length < 96:
        raise ValueError(f"length is {length}; the texts need at least 96 words")
    rng = Random(f"{task}/{length}/{seed}")
    if task in _PROGRAMS:
        return _item(task, _PROGRAMS[task](rng, length - 1), length)
    recipe = _RECIPES[task]
    while True:
        world = write_world(
            rng,
            length - _ROOM,
            density=recipe.density,
            num_documents=num_documents(length) if recipe.documents else 0,
            features=recipe.features,
        )
        if is_possible(recipe.question, world):
            documents = world.documents if recipe.documents else ()
            return _item(task, _asked(recipe.question, world, rng), length, documents)


def shared(length: int, seed: int) -> list[Item]:
    """One item of every task that asks about documents, all over the *same* context.

    The context is read once, and its cache can be used for every question.
    """
    rng = Random(f"shared/{length}/{seed}")
    tasks = [task for task, recipe in _RECIPES.items() if recipe.density < 1 and task != "direct"]
    kinds = {_RECIPES[task].question for task in tasks}
    while True:
        world = write_world(
            rng,
            length - _ROOM,
            num_documents=num_documents(length),
            features=("chains", "likes", "references"),
        )
        if all(is_possible(kind, world) for kind in kinds):
            break
    return [
        _item(task, _asked(_RECIPES[task].question, world, rng), length, world.documents)
        for task in tasks
        if task != "docs1"  # over documents, recall is the same question
    ]


def begins_with(answer: str, generated: str) -> bool:
    """Whether the text begins with the answer's words."""
    words = answer.split()
    return generated.split()[: len(words)] == words


def is_correct(item: Item, generated: str) -> bool:
    """Whether the answer is right to the last word; what follows `done` does not count."""
    return begins_with(item.answer, generated)


Row = tuple[list[str], list[bool]]
"""Words, and for each of them whether the model is trained to predict it."""

LONGEST_WALK = 2048
"""Row length above which a walk runs out of names."""

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
    """Adds words to a row in place; supervised: whether the model is trained to predict them."""
    row[0].extend(words)
    row[1].extend([supervised] * len(words))


def _program_row(write: Callable[[Random, int], Program], rng: Random, length: int) -> Row:
    """Writes one program with its answer."""
    context, question, answer = write(rng, length - 4)
    row: Row = ([BOS], [False])
    append_words(row, [*context, *question], False)
    append_words(row, [*answer, "done", EOS], True)
    return row


def _asked_row(weighted: dict[str, float], rng: Random, length: int) -> Row:
    """Writes a world and asks about it, in these kinds of questions, until the row is full."""
    while True:
        world = _some_world(rng, int(length * rng.uniform(0.45, 0.75)))
        kinds = [kind for kind in weighted if is_possible(kind, world)]
        if kinds:
            break
    row: Row = ([BOS], [False])
    append_words(row, world.words, False)
    weights = [weighted[kind] for kind in kinds]
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
    "questions": partial(_asked_row, _QUESTION_WEIGHTS),
    "walk": partial(_program_row, walk),
    "derive": partial(_program_row, derive),
    "direct": partial(_asked_row, {"direct": 1.0}),
    "walk2": partial(_program_row, walk2),
    "walk3": partial(_program_row, walk3),
}


_WEIGHTS = {"questions": 3.0, "walk": 1.5, "derive": 3.0}
"""Text that a model generates at length has the largest weight."""
_HOPS_WEIGHTS = {"questions": 3.0, "walk": 1.5, "derive": 3.0, "walk2": 2.0}
"""The same for the model that resolves two facts in one step."""


class HeadTexts:
    """A corpus for `keyhole train-head` whose items are in no evaluation.

    Every text is a prompt and an answer that takes about half of it. hops: with walks that
    "tiny-hops" learned and "tiny" did not.
    """

    name = "the bundled model's texts"

    def __init__(self, *, hops: bool = False) -> None:
        self._weights = _HOPS_WEIGHTS if hops else _WEIGHTS

    @property
    def digest(self) -> str:
        """Digest of the mixture; the texts themselves change only with Keyhole's version."""
        return hashlib.sha256(json.dumps(self._weights).encode()).hexdigest()

    def text(self, rng: Random, length: int) -> list[int]:
        """Token ids of one row of at most `length` words, at least 96."""
        weights = self._weights
        kinds = [kind for kind in weights if kind != "walk" or length <= LONGEST_WALK]
        kind = rng.choices(kinds, [weights[kind] for kind in kinds])[0]
        words, _ = ROWS[kind](rng, length)
        return [WORD_IDS[word] for word in words]

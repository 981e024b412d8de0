"""The material of plain-English samples: words, filler, articles, and the user's own dataset.

The word lists are our own; if a long text needs more words, two nouns are joined (`riverbell`).
Names of people and places are made of syllables. RULER's `noise` is one line of five short
sentences, repeated; ours has other sentences. Its `essay` is Paul Graham's essays; ours consists of
sentences drawn from small patterns, which do not repeat each other but tell no story. Neither
contains a digit.

Articles are about people and their home towns. Every name belongs to one thing only, so answers
follow from the articles alone, and an article that is not needed does not contain the answer.

A dataset is a JSON file of SQuAD (1.1 or 2.0) or HotpotQA, read as RULER reads them: every
paragraph is one document; questions that SQuAD 2.0 marks as impossible are left out.
"""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

from keyhole.errors import ConfigError

Drawn = TypeVar("Drawn")

_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
ADJECTIVES, NOUNS, VERBS = (
    tuple(_WORDS[kind].split()) for kind in ("adjectives", "nouns", "verbs")
)
_PATTERNS: tuple[str, ...] = tuple(_WORDS["patterns"])

_SYLLABLES = tuple(map("".join, product("bdfgjklmnprstvz", "aeiou")))
_ENDINGS = "lmnrst"


class Stream(Generic[Drawn]):
    """Items drawn one after another and remembered, so that a longer text extends a shorter one."""

    def __init__(self, draw: Callable[[], Drawn]) -> None:
        self._draw = draw
        self._drawn: list[Drawn] = []

    def first(self, number: int) -> list[Drawn]:
        """The first `number` items, as a new list."""
        while len(self._drawn) < number:
            self._drawn.append(self._draw())
        return self._drawn[:number]


def unique(draw: Callable[[], str]) -> Callable[[], str]:
    """`draw` without repetitions."""
    seen: set[str] = set()

    def again() -> str:
        while (found := draw()) in seen:
            pass
        seen.add(found)
        return found

    return again


def key(rng: Random) -> str:
    """An adjective and a noun, as `quiet-river`; there are 35,000 combinations."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def number(rng: Random) -> str:
    """A number of seven digits."""
    return str(rng.randrange(10**6, 10**7))


def identifier(rng: Random) -> str:
    """A UUID of version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def name(rng: Random) -> str:
    """A meaningless name of seven letters; since all have the same length, none is part of
    another.
    """
    first, second, third = rng.choices(_SYLLABLES, k=3)
    return f"{first}{second}{third}{rng.choice(_ENDINGS)}".capitalize()


def vocabulary(rng: Random) -> Iterator[str]:
    """Every listed word in random order, then pairs of nouns, without repetition."""
    listed = [*ADJECTIVES, *NOUNS, *VERBS]
    rng.shuffle(listed)
    yield from listed
    pairs = [first + second for first, second in product(NOUNS, NOUNS) if first != second]
    rng.shuffle(pairs)
    yield from pairs


NOISE = "The lake is calm. The leaf is red. The hill is steep. We set out. We came home again."

_AN = re.compile(r"\b([Aa])(?= (?:[aeiou]|honest))")


def sentence(rng: Random) -> str:
    """A sentence of about a dozen words."""
    a, b = rng.sample(ADJECTIVES, 2)
    n, m = rng.sample(NOUNS, 2)
    said = rng.choice(_PATTERNS).format(a=a, b=b, n=n, m=m, v=rng.choice(VERBS))
    return _AN.sub(r"\1n", said)


def with_needles(filler: Sequence[str], needles: Sequence[tuple[float, str]]) -> list[str]:
    """`filler` with each needle at its position, from 0 (before everything) to 1 (after it)."""
    text: list[str] = []
    done = 0
    for place, needle in sorted(needles):
        until = round(place * len(filler))
        text += [*filler[done:until], needle]
        done = until
    return [*text, *filler[done:]]


_JOBS = "painter baker sailor teacher weaver doctor tailor singer farmer carpenter".split()


@dataclass(frozen=True, kw_only=True)
class Article:
    """A title, and the facts of the article."""

    title: str
    facts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The title on a line of its own, and the facts."""
        return f"{self.title}\n{' '.join(self.facts)}"


@dataclass(frozen=True, kw_only=True)
class ArticleQuestion:
    """A question, its answer, and the needed articles with their facts, in order."""

    question: str
    answer: str
    articles: tuple[Article, ...]
    facts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Home:
    """A person and the town where this person, and nobody else in the sample, was born."""

    person: str
    town: str
    teacher: str
    river: str
    founder: str
    job: str
    year: int
    plain: tuple[str, str]

    @property
    def born(self) -> str:
        return f"{self.person} was born in the town of {self.town}."

    @property
    def taught(self) -> str:
        return f"The teacher of {self.person} was {self.teacher}."

    @property
    def flows(self) -> str:
        return f"The river that flows through {self.town} is the {self.river}."

    @property
    def founded(self) -> str:
        return f"{self.town} was founded by {self.founder}."

    @property
    def about_person(self) -> Article:
        trade = f"By trade {self.person} was a {self.job}, from {self.year} on."
        return Article(title=self.person, facts=(self.born, trade, self.taught, self.plain[0]))

    @property
    def about_town(self) -> Article:
        return Article(title=self.town, facts=(self.flows, self.plain[1], self.founded))


class Articles:
    """The articles of one sample: those of the question, and any number of others."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._name: Callable[[], str] = unique(lambda: name(rng))
        self._waiting: list[Article] = []

    def ask(self, hops: int) -> ArticleQuestion:
        """A question of one or two hops about a new person or town."""
        home = self._home()
        river = "Which river flows through"
        founder = "Who founded"
        there = f"the town where {home.person} was born?"
        if hops == 2:
            question, answer, fact = self._rng.choice(
                [(river, home.river, home.flows), (founder, home.founder, home.founded)]
            )
            return ArticleQuestion(
                question=f"{question} {there}",
                answer=answer,
                articles=(home.about_person, home.about_town),
                facts=(home.born, fact),
            )
        teacher = f"Who was the teacher of {home.person}?"
        question, answer, fact, article = self._rng.choice(
            [
                (teacher, home.teacher, home.taught, home.about_person),
                (f"{river} {home.town}?", home.river, home.flows, home.about_town),
                (f"{founder} {home.town}?", home.founder, home.founded, home.about_town),
            ]
        )
        return ArticleQuestion(question=question, answer=answer, articles=(article,), facts=(fact,))

    def other(self) -> Article:
        """An unrelated article of the same form."""
        if not self._waiting:
            home = self._home()
            self._waiting = [home.about_person, home.about_town]
        return self._waiting.pop(0)

    def _home(self) -> _Home:
        rng = self._rng
        person, teacher, founder = (f"{self._name()} {self._name()}" for _ in range(3))
        return _Home(
            person=person,
            town=self._name(),
            teacher=teacher,
            river=self._name(),
            founder=founder,
            job=rng.choice(_JOBS),
            year=rng.randrange(1500, 2000),
            plain=(sentence(rng), sentence(rng)),
        )


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, all right answers, and numbers of documents.

    given: the documents of the question, and needed: those of them that are needed, if the file
    says so. near: others of the same article, as distractors.
    """

    question: str
    answers: tuple[str, ...]
    given: tuple[int, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """All questions of a file and all its documents."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


@lru_cache(maxsize=2)
def read_dataset(path: str) -> Dataset:
    """The dataset in a file; ConfigError if it cannot be read or has neither format."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        found = _squad(data["data"]) if isinstance(data, dict) else _hotpot(data)
    except OSError as error:
        raise ConfigError(f"data {path!r} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"data {path!r} is not a JSON file in the format of SQuAD or HotpotQA"
        ) from error
    if not found.questions:
        raise ConfigError(f"data {path!r} has no question that can be answered")
    return found


def _squad(articles: list[dict[str, Any]]) -> Dataset:
    paragraphs = [[one["context"] for one in article["paragraphs"]] for article in articles]
    texts, places = _documents([text for article in paragraphs for text in article])
    questions = []
    for article in articles:
        siblings = {places[one["context"]] for one in article["paragraphs"]}
        for paragraph in article["paragraphs"]:
            here = places[paragraph["context"]]
            questions += [
                Question(
                    question=asked["question"],
                    answers=tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])),
                    given=(here,),
                    needed=(here,),
                    near=tuple(sorted(siblings - {here})),
                )
                for asked in paragraph["qas"]
                if not asked.get("is_impossible") and asked["answers"]
            ]
    return Dataset(questions=tuple(questions), documents=texts)


def _hotpot(items: list[dict[str, Any]]) -> Dataset:
    texts, places = _documents([_titled(*part) for one in items for part in one["context"]])
    questions = []
    for one in items:
        given = {places[_titled(*part)]: part[0] for part in one["context"]}
        facts = {title for title, _ in one.get("supporting_facts", [])}
        needed = tuple(place for place, title in given.items() if title in facts)
        questions.append(
            Question(
                question=one["question"],
                answers=(one["answer"],),
                given=tuple(given),
                needed=needed or tuple(given),
            )
        )
    return Dataset(questions=tuple(questions), documents=texts)


def _titled(title: str, sentences: list[str]) -> str:
    return f"{title}\n{''.join(sentences)}"


def _documents(texts: list[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Each text once, in sorted order, and its number."""
    once = tuple(sorted({*texts}))
    return once, {text: number for number, text in enumerate(once)}

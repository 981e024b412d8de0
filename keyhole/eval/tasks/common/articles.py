"""Short made-up articles about people and their home towns, with questions of one and two hops.

Every name stands for one thing only and is made of syllables, so nothing can be known but from the
articles, and an article that is not needed does not contain the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from keyhole.eval.tasks.common.filler import sentence
from keyhole.eval.tasks.common.words import name, unique

_JOBS = "painter baker sailor teacher weaver doctor tailor singer farmer carpenter".split()


@dataclass(frozen=True, kw_only=True)
class Article:
    """A title and what the article says of it, fact by fact."""

    title: str
    facts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The title on a line of its own, and the facts."""
        return f"{self.title}\n{' '.join(self.facts)}"


@dataclass(frozen=True, kw_only=True)
class ArticleQuestion:
    """A question, its answer, and the articles with the facts that are needed, in that order."""

    question: str
    answer: str
    articles: tuple[Article, ...]
    facts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Home:
    """A person and the town where nobody else in the sample was born."""

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
        """A question of one or two hops about a person or a town of its own."""
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
        """An article about something else, of the same form."""
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

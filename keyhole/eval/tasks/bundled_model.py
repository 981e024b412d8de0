"""Tasks in the words of the bundled model: documents, its own items, one fact at a depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keyhole.config import setting
from keyhole.errors import UnknownNameError
from keyhole.eval.tasks.base import (
    TINY,
    CountTokens,
    Sample,
    Task,
    Written,
    begins_with,
    fitted,
    require_depth,
    require_sample,
    room_for_steps,
)
from keyhole.eval.tasks.materials import with_needles
from keyhole.eval.tiny_language import documents as tiny_documents
from keyhole.eval.tiny_language import tasks
from keyhole.eval.tiny_language.documents import KINDS, MIN_WORDS, WHERE
from keyhole.eval.tiny_language.tasks import TASKS, Item
from keyhole.eval.tiny_language.world import NAMES, NUMBERS, framed, write_world


class TinyTask(Task):
    """A task in the words of the bundled model."""

    text: ClassVar[str] = TINY

    def score(self, sample: Sample, generated: str) -> float:
        """1 if the answer is right to its last word, whatever follows; else 0."""
        return begins_with(sample.answers[0], generated)


@dataclass(frozen=True, kw_only=True)
class TinyDocuments(TinyTask):
    """Answer a question from one or two of several documents.

    Questions over several documents in the bundled model's words: one hop, two, or a reference.

    Items are those of `keyhole.eval.tiny_language.documents`, which says what each kind asks and
    where its facts may stand.
    """

    kind: str
    num_documents: int = setting(3, "documents of the same length, at least 320 words each")
    where: str = setting("anywhere", f"place of the facts in their documents: {', '.join(WHERE)}")

    def __post_init__(self) -> None:
        if self.where not in WHERE:
            raise UnknownNameError("place", self.where, WHERE)

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the needed sentences are `Sample.depths`."""
        require_sample(length, seed)

        def write(words: int) -> Written:
            item = tiny_documents.make(
                self.kind,
                num_documents=self.num_documents,
                words=words,
                seed=seed,
                where=self.where,
            )
            return Written(
                context=" ".join(item.documents),
                question=f" {item.question}",
                answers=(item.answer,),
                needed=tuple(passage.text for passage in item.needed),
                documents=item.documents,
                new_tokens=room_for_steps(item.answer, count),
            )

        return fitted(self.name, length, seed, count, write, least=MIN_WORDS)


TINY_DOCUMENTS = tuple(TinyDocuments(name=f"tiny_documents_{kind}", kind=kind) for kind in KINDS)


_LEAST_ITEM_WORDS = 96
_MOST_WORDS = {"walk": 2012, "derive": 7673}
"""Beyond, names run out: 300 rules of a walk, 319 steps of a computation."""


@dataclass(frozen=True, kw_only=True)
class TinyItem(TinyTask):
    """A task of the bundled model.

    The bundled model's own tasks: items of its world of 928 words, by their names there.

    Items are those of `keyhole.eval.tiny_language.tasks`, which says what each asks. An answer
    counts when it is right to the last word, as in the table of the model's card; a quarter more
    than the right answer may be generated, so that writing too much is seen.

    Of `count` nothing can be concluded: with full attention the model itself is right in a quarter
    of the cases.
    """

    item: str
    """Its name in `keyhole.eval.tiny_language.tasks`."""

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; `Sample.depths` are the facts that the answer repeats.

        Derivations, counts and majorities need much of the prompt and have none.
        """
        require_sample(length, seed)

        def write(words: int) -> Written:
            item = tasks.make(self.item, words, seed)
            return Written(
                context=item.context,
                question=f" {item.question}",
                answers=(item.answer,),
                needed=() if self.item in _MOST_WORDS else _stated(item),
                documents=item.documents,
                new_tokens=room_for_steps(item.answer, count),
            )

        most = _MOST_WORDS.get(self.item)
        return fitted(self.name, length, seed, count, write, least=_LEAST_ITEM_WORDS, most=most)


def _stated(item: Item) -> tuple[str, ...]:
    """The sentences of the answer that the context contains exactly once."""
    facts = [f"{part.strip()} ." for part in item.answer.split(" .")[:-1]]
    return tuple(fact for fact in facts if item.context.count(fact) == 1)


TINY_ITEMS = tuple(TinyItem(name=f"tiny_{task}", item=task) for task in TASKS)


_LEAST_NEEDLE_WORDS = 64


@dataclass(frozen=True, kw_only=True)
class TinyNeedle(TinyTask):
    """Give the number that somebody keeps.

    One fact at a chosen depth, in the bundled model's words: what its needle heat-map is made of.

    `tiny_passkey` hides it in filler, `tiny_needle` among facts about others and filler, as in the
    recall of the bundled model's own tasks.
    """

    density: float
    """Share of the words that belong to other facts."""
    depth: float | None = setting(None, "where the fact stands, from 0 to 1; None: anywhere")

    def __post_init__(self) -> None:
        require_depth(self.depth)

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the fact's place is `Sample.depths`."""
        place = self.random(length, seed, "place").random() if self.depth is None else self.depth

        def write(words: int) -> Written:
            rng = self.random(length, seed)
            world = " ".join(write_world(rng, words, density=self.density).words)
            told = {*world.split()}
            name = rng.choice([name for name in NAMES if name not in told])
            # The number may be that of somebody else where all of them are.
            number = rng.choice([number for number in NUMBERS if number not in told] or NUMBERS)
            needle = f"{name} keeps {number} ."
            sentences = [f"{part.strip()} ." for part in world.split(" .") if part.strip()]
            return Written(
                context=" ".join(with_needles(sentences, [(place, needle)])),
                question=" " + " ".join(framed([name, "keeps", "?"])),
                answers=(f"{needle} done",),
                needed=(needle,),
                new_tokens=room_for_steps(f"{needle} done", count),
            )

        return fitted(self.name, length, seed, count, write, least=_LEAST_NEEDLE_WORDS)


TINY_NEEDLES = (
    TinyNeedle(name="tiny_passkey", density=0.0),
    TinyNeedle(name="tiny_needle", density=0.3),
)

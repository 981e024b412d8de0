"""Tasks in the vocabulary of the bundled model: documents, its own items, one fact at a depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keyhole.config import require_known, setting
from keyhole.eval.tasks.base import (
    TINY,
    CountTokens,
    Sample,
    Task,
    TaskAtDepth,
    Written,
    fitted,
    require_sample,
    room_for_steps,
)
from keyhole.eval.tasks.materials import with_needles
from keyhole.eval.tiny_language import documents as tiny_documents
from keyhole.eval.tiny_language import tasks
from keyhole.eval.tiny_language.documents import KINDS, MIN_WORDS, WHERE
from keyhole.eval.tiny_language.tasks import TASKS, Item, begins_with
from keyhole.eval.tiny_language.world import NAMES, NUMBERS, framed, write_world


class TinyTask(Task):
    """A task in the vocabulary of the bundled model."""

    text: ClassVar[str] = TINY

    def score(self, sample: Sample, generated: str) -> float:
        """1 if the answer is right to its last word, whatever follows; else 0."""
        return float(begins_with(sample.answers[0], generated))

    def can_be_right(self, sample: Sample, generated: str) -> bool:
        """Whether every word so far is right; the last one may not be complete."""
        answer = sample.answers[0]
        begun = answer.startswith(" ".join(generated.split()))
        return begun or begins_with(answer, generated)


@dataclass(frozen=True, kw_only=True)
class TinyDocuments(TinyTask):
    """Answer a question from one or two of several documents.

    Questions over several documents in the bundled model's vocabulary: one hop, two hops, or a
    reference.

    `keyhole.eval.tiny_language.documents` makes the items; it defines what each kind asks and where
    its facts can be.
    """

    kind: str
    num_documents: int = setting(
        3, "number of documents, all of the same length of at least 320 words"
    )
    where: str = setting(
        "anywhere", f"position of the facts in their documents: {', '.join(WHERE)}"
    )

    def __post_init__(self) -> None:
        require_known("place", self.where, WHERE)

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; `Sample.depths` are the needed sentences."""
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
                max_new_tokens=room_for_steps(item.answer, count),
            )

        return fitted(self.name, length, seed, count, write, least=MIN_WORDS)


TINY_DOCUMENTS = tuple(TinyDocuments(name=f"tiny_documents_{kind}", kind=kind) for kind in KINDS)


_LEAST_ITEM_WORDS = 96
_MOST_WORDS = {"walk": 2012, "derive": 7673}
"""Above these lengths names run out: 300 rules of a walk, 319 steps of a computation."""


@dataclass(frozen=True, kw_only=True)
class TinyItem(TinyTask):
    """A task of the bundled model.

    The bundled model's own tasks, in its vocabulary of 928 words, under the names that they have
    there.

    `keyhole.eval.tiny_language.tasks` makes the items and defines what each asks. An answer counts
    if it is right to the last word, as in the table of the model's card; a quarter more tokens than
    the right answer may be generated, so that superfluous text shows.

    `count` allows no conclusions, because with full attention the model is right in only a quarter
    of the cases. `direct`, `walk2` and `walk3` need two or three facts in one step, which the
    bundled model did not learn.
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
                max_new_tokens=room_for_steps(item.answer, count),
            )

        most = _MOST_WORDS.get(self.item)
        return fitted(self.name, length, seed, count, write, least=_LEAST_ITEM_WORDS, most=most)


def _stated(item: Item) -> tuple[str, ...]:
    """The sentences of the answer that occur exactly once in the context."""
    facts = [f"{part.strip()} ." for part in item.answer.split(" .")[:-1]]
    return tuple(fact for fact in facts if item.context.count(fact) == 1)


TINY_ITEMS = tuple(TinyItem(name=f"tiny_{task}", item=task) for task in TASKS)


_LEAST_NEEDLE_WORDS = 64


@dataclass(frozen=True, kw_only=True)
class TinyNeedle(TinyTask, TaskAtDepth):
    """Give the number that a person keeps.

    One fact at a chosen depth, in the bundled model's vocabulary: the basis of its needle heat map.

    `tiny_passkey` hides the fact in filler, `tiny_needle` among facts about others and filler, as
    in the recall of the bundled model's own tasks.
    """

    density: float
    """Share of the words in other facts."""

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; `Sample.depths` is the position of the fact."""
        place = self.place(self.random(length, seed, "place"))

        def write(words: int) -> Written:
            rng = self.random(length, seed)
            world = " ".join(write_world(rng, words, density=self.density).words)
            used = {*world.split()}
            name = rng.choice([name for name in NAMES if name not in used])
            # If all numbers are taken, the number may occur in another fact, too.
            number = rng.choice([number for number in NUMBERS if number not in used] or NUMBERS)
            needle = f"{name} keeps {number} ."
            sentences = [f"{part.strip()} ." for part in world.split(" .") if part.strip()]
            return Written(
                context=" ".join(with_needles(sentences, [(place, needle)])),
                question=" " + " ".join(framed([name, "keeps", "?"])),
                answers=(f"{needle} done",),
                needed=(needle,),
                max_new_tokens=room_for_steps(f"{needle} done", count),
            )

        return fitted(self.name, length, seed, count, write, least=_LEAST_NEEDLE_WORDS)


TINY_NEEDLES = (
    TinyNeedle(name="tiny_passkey", density=0.0),
    TinyNeedle(name="tiny_needle", density=0.3),
)

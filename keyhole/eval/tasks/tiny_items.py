"""The bundled model's own tasks: items of its world of 928 words, by their names there.

Items are those of `keyhole.eval.tiny_language.tasks`, which says what each asks. An answer counts when it
is right to the last word, as in the table of the model's card; a quarter more than the right answer
may be generated, so that writing too much is seen.

Of `count` nothing can be concluded: with full attention the model itself is right in a quarter of
the cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keyhole.eval.tasks.base import TINY, CountTokens, Sample, Task, require_sample
from keyhole.eval.tasks.common.fitting import Written, fitted, room_for_steps
from keyhole.eval.tasks.common.scores import begins_with
from keyhole.eval.tiny_language.tasks import TASKS, Item, make

_LEAST_WORDS = 96
_MOST_WORDS = {"walk": 2012, "derive": 7673}
"""Beyond, names run out: 300 rules of a walk, 319 steps of a computation."""


@dataclass(frozen=True, kw_only=True)
class TinyItem(Task):
    """A task of the bundled model."""

    text: ClassVar[str] = TINY

    item: str
    """Its name in `keyhole.eval.tiny_language.tasks`."""

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; `Sample.depths` are the facts that the answer repeats.

        Derivations, counts and majorities need much of the prompt and have none.
        """
        require_sample(length, seed)

        def write(words: int) -> Written:
            item = make(self.item, words, seed)
            return Written(
                context=item.context,
                question=f" {item.question}",
                answers=(item.answer,),
                needed=() if self.item in _MOST_WORDS else _stated(item),
                documents=item.documents,
                new_tokens=room_for_steps(item.answer, count),
            )

        most = _MOST_WORDS.get(self.item)
        return fitted(self.name, length, seed, count, write, least=_LEAST_WORDS, most=most)

    def score(self, sample: Sample, generated: str) -> float:
        """1 if the answer is right to its last word, whatever follows; else 0."""
        return begins_with(sample.answers[0], generated)


def _stated(item: Item) -> tuple[str, ...]:
    """The sentences of the answer that stand in the context as they are, once."""
    facts = [f"{part.strip()} ." for part in item.answer.split(" .")[:-1]]
    return tuple(fact for fact in facts if item.context.count(fact) == 1)


TINY_ITEMS = tuple(TinyItem(name=f"tiny_{task}", item=task) for task in TASKS)

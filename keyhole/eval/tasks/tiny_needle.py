"""One fact at a chosen depth, in the bundled model's words: what its needle heat-map is made of.

`tiny_passkey` hides it in filler, `tiny_needle` among facts about others and filler, as in the
recall of the bundled model's own tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keyhole.config import setting
from keyhole.eval.tasks.base import TINY, CountTokens, Sample, Task, require_depth
from keyhole.eval.tasks.common.filler import with_needles
from keyhole.eval.tasks.common.fitting import Written, fitted, room_for_steps
from keyhole.eval.tasks.common.scores import begins_with
from keyhole.eval.tiny_language.questions import framed
from keyhole.eval.tiny_language.vocabulary import NAMES, NUMBERS
from keyhole.eval.tiny_language.world import write_world

_LEAST_WORDS = 64


@dataclass(frozen=True, kw_only=True)
class TinyNeedle(Task):
    """Give the number that somebody keeps."""

    text: ClassVar[str] = TINY

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

        return fitted(self.name, length, seed, count, write, least=_LEAST_WORDS)

    def score(self, sample: Sample, generated: str) -> float:
        """1 if the answer is right to its last word, whatever follows; else 0."""
        return begins_with(sample.answers[0], generated)


TINY_NEEDLES = (
    TinyNeedle(name="tiny_passkey", density=0.0),
    TinyNeedle(name="tiny_needle", density=0.3),
)

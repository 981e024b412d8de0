"""The passkey: a number of five digits in one line repeated again and again, at a chosen depth.

Mohtashami and Jaggi, "Landmark Attention", NeurIPS 2023, section 4.2; InfiniteBench's `passkey`.
Scored by whether the first number in the answer is the key.

Difference: line, needle and instruction are reworded; 16 new tokens (InfiniteBench: 6), because
some tokenizers write a digit each and some models a word first.
"""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.config import setting
from keyhole.eval.tasks.base import CountTokens, Sample, Task, require_depth
from keyhole.eval.tasks.common.filler import NOISE, with_needles
from keyhole.eval.tasks.common.fitting import Written, fitted, room_for
from keyhole.eval.tasks.common.scores import first_number

_NEW_TOKENS = 16
_INSTRUCTION = (
    "One thing in the following text matters, and the rest does not. Find it and keep it in mind; "
    "a question about it follows.\n"
)


@dataclass(frozen=True, kw_only=True)
class Passkey(Task):
    """Give the number."""

    depth: float | None = setting(None, "where the key stands, from 0 to 1; None: anywhere")

    def __post_init__(self) -> None:
        require_depth(self.depth)

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the key's place is `Sample.depths`."""
        rng = self.random(length, seed)
        passkey = str(rng.randrange(10000, 100000))
        place = rng.random() if self.depth is None else self.depth
        needle = f"The passkey is {passkey}. Keep it in mind: {passkey} is the passkey."
        new_tokens = room_for(passkey, count, _NEW_TOKENS)

        def write(size: int) -> Written:
            return Written(
                context=_INSTRUCTION + "\n".join(with_needles([NOISE] * size, [(place, needle)])),
                question="\nWhat is the passkey?",
                answer_prefix=" The passkey is",
                answers=(passkey,),
                needed=(needle,),
                new_tokens=new_tokens,
            )

        return fitted(self.name, length, seed, count, write)

    def score(self, sample: Sample, generated: str) -> float:
        """1 if the first number is the key, else 0."""
        return first_number(sample.answers, generated)


PASSKEY = Passkey(name="passkey")

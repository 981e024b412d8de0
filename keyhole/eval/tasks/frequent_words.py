"""RULER's frequent words (`fwe`): the three most frequent words of a text in code.

Words of six random letters follow a zeta distribution: the k-th of them stands there with a share
of k^-2 / zeta(2). The first is written as dots, and does not count; the next three are the answer.
There are as many different words as a fiftieth of the tokens. RULER (COLM 2024), section 3.3 and
its `synthetic.yaml` (alpha 2); 50 new tokens, scored by string_match_all.

Differences: templates are reworded; each sample is filled by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from keyhole.eval.tasks.base import CountTokens, Sample, Task
from keyhole.eval.tasks.common.fitting import Written, fitted, room_for
from keyhole.eval.tasks.common.scores import string_match_all
from keyhole.eval.tasks.common.words import unique

_LETTERS = 6
_ASKED = 3
_NEW_TOKENS = 50
_DOTS = "..."
_ZETA_2 = math.pi**2 / 6
_LEAST = 60
"""Words with which the three asked for differ in number from each other and from the next."""
_INSTRUCTION = (
    "The text below is in code. Watch how often each word of it appears and find the three most "
    "frequent ones. "
)
_QUESTION = (
    "\nQuestion: Without explaining anything, and leaving out the dots '...': which three words "
    "appear most often in the text above?"
)
_PREFIX = " Answer: The three words that appear most often in the text above are:"


@dataclass(frozen=True, kw_only=True)
class FrequentWords(Task):
    """Name the most frequent words of a coded text."""

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the whole text is needed, so there are no depths."""
        rng = self.random(length, seed)
        draw = unique(lambda: "".join(rng.choices(ascii_lowercase, k=_LETTERS)))
        words = [draw() for _ in range(max((length - _NEW_TOKENS) // 50, _ASKED + 2))]
        answers = tuple(words[1 : _ASKED + 1])
        new_tokens = room_for(" ".join(answers), count, _NEW_TOKENS)

        def write(size: int) -> Written:
            text = _coded(words, size)
            self.random(length, seed, "order").shuffle(text)
            return Written(
                context=_INSTRUCTION + " ".join(text),
                question=_QUESTION,
                answer_prefix=_PREFIX,
                answers=answers,
                new_tokens=new_tokens,
            )

        return fitted(self.name, length, seed, count, write, least=_LEAST)

    def score(self, sample: Sample, generated: str) -> float:
        """Share of the three words that were named."""
        return string_match_all(sample.answers, generated)


def _coded(words: Sequence[str], size: int) -> list[str]:
    """About `size` words in the order of their frequency."""
    text: list[str] = []
    for rank, word in enumerate([_DOTS, *words[1:]], start=1):
        text += [word] * int(size / rank**2 / _ZETA_2)
    return text


FWE = FrequentWords(name="fwe")

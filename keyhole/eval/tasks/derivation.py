"""Long derivations in plain English: a walk along rules, and a computation of many steps.

`walk` refers to the prompt: each step is a rule that stands somewhere in it. `derive` refers,
besides, to what was generated: each step needs the result of an earlier one, which stands in no
other place, so that forgetting what was written is as fatal as forgetting the prompt. The rules are
those of the bundled model's generators; instruction and a solved example are added.

These are no public benchmark: reasoning benchmarks with long generations (AIME, MATH) need data and
models that know mathematics, and tell less about which token was missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from keyhole.eval.tasks.base import CountTokens, Sample, Task
from keyhole.eval.tasks.common.fitting import Written, fitted, room_for_steps
from keyhole.eval.tasks.common.scores import share_before_first_error
from keyhole.eval.tasks.common.words import name, unique
from keyhole.eval.tiny_language.programs import Program, derive, walk
from keyhole.eval.tiny_language.vocabulary import NAMES, STEPS

_EXAMPLE_WORDS = {"walk": 50, "derive": 66}
"""Enough for a walk of four steps, and for a computation of two."""
_WALK = (
    "Below are rules in random order, each telling which name follows a name. Asked for a walk "
    "from a name, write the rule of that name, then the rule of the name that follows it, and so "
    "on to the rule that ends with nobody. Write the rules as they stand there, and nothing else."
)
_DERIVE = (
    "Below is a program in random order. Each step takes the value of an earlier step and adds a "
    "number to it; of the sum only the last digit counts. Asked to compute some steps, write for "
    "each of them in turn which step it takes, which number it adds, what the step that it takes "
    "is, and what it is itself, in the form of the example, and nothing else."
)


@dataclass(frozen=True, kw_only=True)
class Derivation(Task):
    """Write out a long chain of steps."""

    instruction: str
    program: Callable[[Random, int], Program]
    words_at_most: int
    """Beyond so many words of prompt and answer, the generator's names run out."""

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the whole prompt is needed, so there are no depths."""
        rules, question, answer = self._example(self.random(length, seed, "example"))
        example = f"Example.\n{rules}{question} {answer}\n\nNow the one that counts.\n"

        def write(words: int) -> Written:
            rules, question, answer = self._told(*self.program(self.random(length, seed), words))
            return Written(
                context=f"{self.instruction}\n\n{example}{rules}",
                question=question,
                answers=(answer,),
                new_tokens=room_for_steps(answer, count),
            )

        least = _EXAMPLE_WORDS[self.name]
        return fitted(self.name, length, seed, count, write, least=least, most=self.words_at_most)

    def score(self, sample: Sample, generated: str) -> float:
        """Share of the sentences written before the first wrong or missing one."""
        return share_before_first_error(_sentences(sample.answers[0]), _sentences(generated))

    def _example(self, rng: Random) -> tuple[str, str, str]:
        """A short program, told with names that no other one has."""
        program = self.program(rng, _EXAMPLE_WORDS[self.name])
        draw = unique(lambda: name(rng))
        names = {word: draw() for word in NAMES} | {word: f"e{word[1:]}" for word in STEPS}
        context, asked, answer = ([names.get(word, word) for word in part] for part in program)
        return self._told(context, asked, answer)

    def _told(
        self, context: list[str], asked: list[str], answer: list[str]
    ) -> tuple[str, str, str]:
        """Rules, question and answer as text."""
        question = f"Walk from {asked[2]}."
        if self.name == "derive":
            question = f"Compute {asked[2]} to {asked[4]}."
        return f"Rules: {_text(context[2:])}\n", f"{question}\nAnswer:", _text(answer)


def _text(words: list[str]) -> str:
    return " ".join(words).replace(" .", ".")


def _sentences(text: str) -> list[list[str]]:
    return [part.split() for part in text.split(".") if part.strip()]


DERIVATIONS = (
    Derivation(name="walk", instruction=_WALK, program=walk, words_at_most=2011),
    Derivation(name="derive", instruction=_DERIVE, program=derive, words_at_most=7672),
)

"""Chains of steps: RULER's variable tracking, and long derivations in plain English."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_uppercase

from keyhole.eval.tasks.base import (
    CountTokens,
    Sample,
    Task,
    Written,
    fitted,
    room_for,
    room_for_steps,
    share_before_first_error,
)
from keyhole.eval.tasks.materials import NOISE, name, unique, with_needles
from keyhole.eval.tiny_language.tasks import Program, derive, walk
from keyhole.eval.tiny_language.world import NAMES, STEPS

_HOPS = 4
_NEW_TOKENS = 30
_EXAMPLE_TOKENS = 500
_VARIABLES = "Keep track of the variables that are assigned in the text below.\n\n"


@dataclass(frozen=True, kw_only=True)
class _Chain:
    variables: tuple[str, ...]
    value: str
    places: tuple[float, ...]

    @property
    def assignments(self) -> tuple[str, ...]:
        later = [f"VAR {new} = VAR {old}" for old, new in pairwise(self.variables)]
        return (f"VAR {self.variables[0]} = {self.value}", *later)

    def context(self, lines: int) -> str:
        placed = list(zip(self.places, self.assignments, strict=True))
        return _VARIABLES + "\n".join(with_needles([NOISE] * lines, placed))

    def question(self) -> tuple[str, str]:
        return (
            f"\nQuestion: Which variables in the text above have the value {self.value}?",
            f" Answer: By the assignments in the text above, {len(self.variables)} variables have "
            f"the value {self.value}:",
        )


def _chain(rng: Random, letters: int) -> _Chain:
    draw = unique(lambda: "".join(rng.choices(ascii_uppercase, k=letters)))
    return _Chain(
        variables=tuple(draw() for _ in range(_HOPS + 1)),
        value=str(rng.randrange(10000, 99999)),
        places=tuple(sorted(rng.random() for _ in range(_HOPS + 1))),
    )


@dataclass(frozen=True, kw_only=True)
class VariableTracking(Task):
    """Follow a chain of assignments from its value to every variable.

    RULER's variable tracking (`vt`): which variables have a given value, directly or not?

    A chain of five assignments is scattered, in order, over lines of noise. A solved example with
    variables of three letters and at most 500 tokens comes first. RULER (COLM 2024), section 3.2;
    one chain of four hops, 30 new tokens, scored by string_match_all.

    Differences: templates and noise are reworded; more than 30 new tokens if a tokenizer needs
    them.
    """

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; all assignments of the chain are needed."""
        example = _example(self.random(length, seed, "example"), count)
        chain = _chain(self.random(length, seed), letters=5)
        question, prefix = chain.question()
        new_tokens = room_for(" ".join(chain.variables), count, _NEW_TOKENS)

        def write(lines: int) -> Written:
            return Written(
                context=f"{example}\n\n{chain.context(lines)}",
                question=question,
                answer_prefix=prefix,
                answers=chain.variables,
                needed=chain.assignments,
                max_new_tokens=new_tokens,
            )

        return fitted(self.name, length, seed, count, write, least=len(chain.variables))


def _example(rng: Random, count: CountTokens) -> str:
    """A solved question with as many lines as 500 tokens allow, and at least one per variable."""
    chain = _chain(rng, letters=3)

    def solved(lines: int) -> str:
        return "".join([chain.context(lines), *chain.question(), " ", " ".join(chain.variables)])

    lines = len(chain.variables)
    while count(solved(lines + 1)) <= _EXAMPLE_TOKENS:
        lines += 1
    return solved(lines)


VT = VariableTracking(name="vt")


_EXAMPLE_WORDS = {"walk": 50, "derive": 66}
"""Words for a walk of four steps, and for a computation of two."""
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
    """Write out a long chain of steps.

    Long derivations in plain English: a walk along rules, and a computation of many steps.

    `walk` refers to the prompt: each step is a rule that is somewhere in it. `derive` also refers
    to generated text: each step needs the result of an earlier one, which is stated nowhere else,
    so that losing generated tokens is as fatal as losing the prompt. The bundled model's generators
    make the rules; an instruction and a solved example are added.

    These are not public benchmarks: reasoning benchmarks with long generations (AIME, MATH) need
    data and models that know mathematics, and say less about which token was missing.
    """

    instruction: str
    program: Callable[[Random, int], Program]
    words_at_most: int
    """Above this number of words in prompt and answer, the generator's names run out."""

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
                max_new_tokens=room_for_steps(answer, count),
            )

        least = _EXAMPLE_WORDS[self.name]
        return fitted(self.name, length, seed, count, write, least=least, most=self.words_at_most)

    def score(self, sample: Sample, generated: str) -> float:
        """Share of the sentences before the first wrong or missing one."""
        return share_before_first_error(_sentences(sample.answers[0]), _sentences(generated))

    def _example(self, rng: Random) -> tuple[str, str, str]:
        """A short program, with names that no other program has."""
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

"""RULER's variable tracking (`vt`): which variables have, directly or not, a given value?

A chain of five assignments is scattered, in order, over lines of noise. A solved example with
variables of three letters and at most 500 tokens stands first. RULER (COLM 2024), section 3.2; one
chain of four hops, 30 new tokens, scored by string_match_all.

Differences: templates and noise are reworded; more than 30 new tokens where a tokenizer needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_uppercase

from keyhole.eval.tasks.base import CountTokens, Sample, Task
from keyhole.eval.tasks.common.filler import NOISE, with_needles
from keyhole.eval.tasks.common.fitting import Written, fitted, room_for
from keyhole.eval.tasks.common.scores import string_match_all
from keyhole.eval.tasks.common.words import unique

_HOPS = 4
_NEW_TOKENS = 30
_EXAMPLE_TOKENS = 500
_INSTRUCTION = "Keep track of the variables that are assigned in the text below.\n\n"


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
        return _INSTRUCTION + "\n".join(with_needles([NOISE] * lines, placed))

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
    """Follow a chain of assignments from its value to every variable."""

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
                new_tokens=new_tokens,
            )

        return fitted(self.name, length, seed, count, write, least=len(chain.variables))

    def score(self, sample: Sample, generated: str) -> float:
        """Share of the variables that were named."""
        return string_match_all(sample.answers, generated)


def _example(rng: Random, count: CountTokens) -> str:
    """A solved question: with as many lines as 500 tokens allow, and at least one per variable."""
    chain = _chain(rng, letters=3)

    def solved(lines: int) -> str:
        return "".join([chain.context(lines), *chain.question(), " ", " ".join(chain.variables)])

    lines = len(chain.variables)
    while count(solved(lines + 1)) <= _EXAMPLE_TOKENS:
        lines += 1
    return solved(lines)


VT = VariableTracking(name="vt")

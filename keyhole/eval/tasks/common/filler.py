"""Text that says nothing to the point, and needles at chosen places of it.

RULER's `noise` is one line of five short sentences again and again; ours has other sentences. Its
`essay` is Paul Graham's essays; ours is made of sentences drawn from small patterns, which do not
repeat each other but tell no story. Neither has a digit in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from keyhole.eval.tasks.common.words import ADJECTIVES, NOUNS, VERBS

NOISE = "The lake is calm. The leaf is red. The hill is steep. We set out. We came home again."

_AN = re.compile(r"\b([Aa])(?= (?:[aeiou]|honest))")
_PATTERNS = (
    "The {a} {n} by the {m} was {b}, and nobody {v} it.",
    "Before the rain began, the {n} of the {a} house {v} a {b} {m}.",
    "People say that a {a} {n} once {v} the {m}, but few of them were there.",
    "When we {v} the {n}, the {m} seemed {a} and the road seemed {b}.",
    "There was a {n} behind the {m}, {a} in the morning and {b} at night.",
    "She {v} the {a} {n} because the {b} {m} had been left outside.",
    "A {n} is rarely as {a} as it looks, and a {m} is often {b}.",
    "He never {v} the {n}, although a {a} {m} is worth the trouble.",
    "Most days they {v} a {m} and talked about the {a} {n} of their {b} years.",
    "If the {n} is {a}, then the {m} need not be {b}.",
    "In the end a {b} {m} {v} what the {a} {n} could not.",
    "Some of us {v} the {m}; others thought the {n} too {a} for such {b} weather.",
)


def sentence(rng: Random) -> str:
    """A sentence of about a dozen words."""
    a, b = rng.sample(ADJECTIVES, 2)
    n, m = rng.sample(NOUNS, 2)
    said = rng.choice(_PATTERNS).format(a=a, b=b, n=n, m=m, v=rng.choice(VERBS))
    return _AN.sub(r"\1n", said)


def with_needles(filler: Sequence[str], needles: Sequence[tuple[float, str]]) -> list[str]:
    """`filler` with each needle at its place, from 0 (before everything) to 1 (after it)."""
    text: list[str] = []
    done = 0
    for place, needle in sorted(needles):
        until = round(place * len(filler))
        text += [*filler[done:until], needle]
        done = until
    return [*text, *filler[done:]]

"""As much text as fits: a task writes a text of any size, and the largest that fits is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keyhole.errors import ConfigError
from keyhole.eval.tasks.base import CountTokens, Sample

_CLOSE = 128
"""A text within one part in this many of the limit is not made longer: another try costs more."""
_FREE_TRIES, _TRIES = 6, 24
"""Guesses by proportion before halving, for texts that grow unevenly; and all of them."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """The text of a sample, before it is known how large it may be."""

    context: str
    question: str
    answer_prefix: str = ""
    answers: tuple[str, ...]
    needed: tuple[str, ...] = ()
    """Sentences of the context, each standing there once, that the answer cannot do without."""
    documents: tuple[str, ...] = ()
    new_tokens: int
    """To generate, at most."""


def fitted(
    task: str,
    length: int,
    seed: int,
    count: CountTokens,
    write: Callable[[int], Written],
    *,
    least: int = 1,
    most: int | None = None,
) -> Sample:
    """The sample of the largest size from `least` to `most` that has at most `length` tokens.

    write: the text of a size; larger sizes should give longer texts. Raises ConfigError where not
    even the least size fits.
    """

    def total(written: Written) -> int:
        # Piece by piece, as setup B encodes them; the whole prompt has one BOS less.
        asked = count(f"{written.question}{written.answer_prefix}")
        return count(written.context) + asked + written.new_tokens

    written = _largest(task, length, write, total, least, most)
    prompt = f"{written.context}{written.question}{written.answer_prefix}"
    return Sample(
        task=task,
        length=length,
        seed=seed,
        context=written.context,
        question=written.question,
        answer_prefix=written.answer_prefix,
        answers=written.answers,
        max_new_tokens=written.new_tokens,
        prompt_tokens=count(prompt),
        depths=tuple(written.context.index(part) / len(written.context) for part in written.needed),
        documents=written.documents,
    )


def room_for(answer: str, count: CountTokens, least: int) -> int:
    """Tokens to generate: as many as the benchmark allows, more where the answer needs more.

    A tokenizer that cuts a text into more tokens than the benchmark's authors had in mind must not
    make the right answer impossible.
    """
    return max(least, count(answer) + 8)


def room_for_steps(answer: str, count: CountTokens) -> int:
    """Tokens to generate for a derivation: a quarter more, so that writing too much is seen."""
    return count(answer) * 5 // 4 + 8


def _largest(
    task: str,
    limit: int,
    write: Callable[[int], Written],
    total: Callable[[Written], int],
    least: int,
    most: int | None,
) -> Written:
    best = write(least)
    size, used = least, total(best)
    if used > limit:
        raise ConfigError(f"length {limit} is too short for {task}: it needs at least {used}")
    too_large = None if most is None else most + 1
    guess = size + 16
    for number in range(_TRIES):
        guess = max(guess, size + 1)
        if too_large is not None:
            guess = min(guess, too_large - 1)
        if guess <= size or limit - used <= limit // _CLOSE:
            break
        written = write(guess)
        tokens = total(written)
        per_size = max(tokens - used, 1) / (guess - size)
        if tokens <= limit:
            size, used, best = guess, tokens, written
        else:
            too_large = guess
        guess = size + int((limit - used) / per_size)
        if too_large is not None and number >= _FREE_TRIES:
            guess = (size + too_large) // 2
    return best

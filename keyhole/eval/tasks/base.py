"""The base of all tasks: a task makes samples from seeds, and scores answers.

A sample keeps the context and the question apart, so that both setups can be run: "prompt" reads
the whole prompt densely and only generation is sparse; "question" reads the context densely, and
both the question and generation are sparse.

A task writes a text of any size; `fitted` finds the largest that fits a length. string_match_all
and string_match_part are RULER's scores (Hsieh et al., COLM 2024; its `eval/synthetic/constants.py`
and the post-processing in `eval/evaluate.py`), for one sample and from 0 to 1 instead of percent.
token_f1 is SQuAD's (Rajpurkar et al., EMNLP 2016), which LongBench uses for question answering;
exact_match is SQuAD's other score.
"""

from __future__ import annotations

import re
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any, ClassVar

from keyhole.config import is_count, is_number, require, setting
from keyhole.errors import ConfigError

PLAIN = "plain English"
TINY = "words of the bundled world"

CountTokens = Callable[[str], int]
"""Number of tokens of a text as a model receives it, including special tokens."""


def token_counter(tokenizer: Any) -> CountTokens:
    """The counter for a tokenizer of transformers."""
    return lambda text: len(tokenizer(text).input_ids)


@dataclass(frozen=True, kw_only=True)
class Written:
    """The text of a sample, before its possible size is known.

    The three pieces of the prompt are concatenated; separators belong to the later piece. If a chat
    template is used, `answer_prefix` is the beginning of the assistant's turn.
    """

    context: str
    question: str
    answer_prefix: str = ""
    answers: tuple[str, ...]
    max_new_tokens: int
    needed: tuple[str, ...] = ()
    """Sentences of the context that the answer needs, each occurring once."""
    documents: tuple[str, ...] = ()
    """The documents in the context, in order; empty if there are none."""

    @property
    def prompt(self) -> str:
        """The whole text before the answer."""
        return f"{self.context}{self.question}{self.answer_prefix}"


@dataclass(frozen=True, kw_only=True)
class Sample(Written):
    """One question with its context and its right answers."""

    task: str
    length: int
    """Requested tokens; the prompt and `max_new_tokens` together have at most this many."""
    seed: int
    prompt_tokens: int
    depths: tuple[float, ...] = ()
    """Where the needed sentences begin in the context, from 0 to 1 of its characters; empty if the
    task has no such sentences, or needs the whole context.
    """


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A kind of question. Fields made with `setting()` can be changed by users (`make_task`)."""

    text: ClassVar[str] = PLAIN
    """The language of its samples: PLAIN or TINY."""

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that users can change, with their values."""
        names = [field.name for field in fields(self) if "help" in field.metadata]
        return {name: getattr(self, name) for name in names}

    @abstractmethod
    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`: at most `length` tokens by `count`, and close to it if possible.

        The same arguments give the same sample, in any process. Raises ConfigError for a length
        that is too short for the task.
        """

    def score(self, sample: Sample, generated: str) -> float:
        """The score of the generated text, from 0 (wrong) to 1 (right): the share of the answers
        that it contains, unless the task has a score of its own.
        """
        return string_match_all(sample.answers, generated)

    def can_be_right(self, sample: Sample, generated: str) -> bool:
        """Whether a text that begins with this one can score above 0; True if that is not known."""
        return True

    def random(self, length: int, seed: int, what: str = "") -> Random:
        """The random numbers of a sample, independent of settings such as a depth.

        what: names an independent stream, so that one choice does not change another.
        """
        require_sample(length, seed)
        return Random(f"{self.name}/{length}/{seed}/{what}")


def require_sample(length: object, seed: object) -> None:
    """Raises ConfigError unless they are a length in tokens and the number of a sample."""
    require(is_count(length), "length", length, "a whole number of tokens, at least 1")
    require(is_count(seed, 0), "seed", seed, "a whole number, at least 0")


@dataclass(frozen=True, kw_only=True)
class TaskAtDepth(Task):
    """A task whose answer stands at one position of the context, which users can choose."""

    depth: float | None = setting(None, "position of the answer, from 0 to 1; None: anywhere")

    def __post_init__(self) -> None:
        good = self.depth is None or (is_number(self.depth) and 0 <= self.depth <= 1)
        require(good, "depth", self.depth, "a number from 0 (start of the context) to 1 (its end)")

    def place(self, rng: Random) -> float:
        """The position, from 0 to 1; a random one unless it is chosen."""
        return rng.random() if self.depth is None else self.depth


_CLOSE = 128
"""A text that lacks less than 1/64 of the limit is not extended, because another try costs more."""
_FREE_TRIES, _TRIES = 6, 24
"""Number of tries by proportion before bisecting, for texts that grow unevenly; and of all tries.
"""


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

    write: makes the text of a size; larger sizes should give longer texts. Raises ConfigError if
    even the least size does not fit.
    """

    def total(written: Written) -> int:
        # Piece by piece, as setup B encodes them; the whole prompt has one BOS less.
        asked = count(f"{written.question}{written.answer_prefix}")
        return count(written.context) + asked + written.max_new_tokens

    written = _largest(task, length, write, total, least, most)
    return Sample(
        **vars(written),
        task=task,
        length=length,
        seed=seed,
        prompt_tokens=count(written.prompt),
        depths=tuple(written.context.index(part) / len(written.context) for part in written.needed),
    )


def room_for(answer: str, count: CountTokens, least: int) -> int:
    """Tokens to generate: as many as the benchmark allows, or more if the answer needs more.

    A tokenizer that splits a text into more tokens than the benchmark's authors assumed must not
    make the right answer impossible.
    """
    return max(least, count(answer) + 8)


def room_for_steps(answer: str, count: CountTokens) -> int:
    """Tokens to generate for a derivation: a quarter more than needed, so that superfluous text
    shows.
    """
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


_CONTROL = re.compile(r"[\x00-\x1f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def string_match_all(answers: Sequence[str], generated: str) -> float:
    """Share of the answers that occur somewhere in the text, ignoring case."""
    text = _cleaned(generated)
    return sum(answer.lower() in text for answer in answers) / len(answers)


def string_match_part(answers: Sequence[str], generated: str) -> float:
    """1 if any of the answers occurs somewhere in the text, ignoring case; else 0."""
    text = _cleaned(generated)
    return float(any(answer.lower() in text for answer in answers))


def first_number(answers: Sequence[str], generated: str) -> float:
    """1 if the first number in the text is the answer, digit by digit; else 0."""
    found = re.search(r"\d+", generated)
    return float(found is not None and found[0] == answers[0])


def token_f1(answers: Sequence[str], generated: str) -> float:
    """Harmonic mean of precision and recall of words, for the best-matching answer.

    Case, punctuation and articles are ignored; words count as often as they occur.
    """
    return max(_f1(_normal(answer), _normal(generated)) for answer in answers)


def exact_match(answers: Sequence[str], generated: str) -> float:
    """1 if the text is one of the answers, ignoring case, punctuation and articles; else 0."""
    return float(any(_normal(answer) == _normal(generated) for answer in answers))


def share_before_first_error(steps: Sequence[object], generated: Sequence[object]) -> float:
    """Share of the steps before the first wrong or missing one."""
    right = 0
    for want, got in zip(steps, generated, strict=False):
        if want != got:
            break
        right += 1
    return right / len(steps)


def _cleaned(generated: str) -> str:
    return _CONTROL.sub("\n", generated.strip()).strip().lower()


def _normal(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(right: list[str], wrote: list[str]) -> float:
    common = (Counter(right) & Counter(wrote)).total()
    return 2 * common / (len(right) + len(wrote)) if common else 0.0

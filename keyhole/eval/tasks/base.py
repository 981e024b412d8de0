"""What every task is: something that makes samples from seeds, and scores what a model wrote.

A sample keeps apart what is read before the question and what comes with it, so that both ways of
measuring can be run: setup A reads the whole prompt densely and only generation is sparse; setup B
reads the context densely and both the question and what is generated sparsely.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from keyhole.config import is_count, is_number, require

PLAIN = "plain English"
TINY = "words of the bundled world"

CountTokens = Callable[[str], int]
"""Tokens of a text as a model is given it, special tokens among them."""


def token_counter(tokenizer: Any) -> CountTokens:
    """The counter of a tokenizer of transformers."""
    return lambda text: len(tokenizer(text).input_ids)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question with what there is to read, and what would be right.

    The three pieces of the prompt are joined as they are; separators belong to the later one. Where
    a chat template is used, `answer_prefix` is the beginning of the assistant's turn.
    """

    task: str
    length: int
    """Tokens asked for; the prompt and `max_new_tokens` together have at most this many."""
    seed: int
    context: str
    question: str
    answer_prefix: str = ""
    answers: tuple[str, ...]
    max_new_tokens: int
    prompt_tokens: int
    depths: tuple[float, ...] = ()
    """Where in the context the needed sentences begin, from 0 to 1 of its characters; empty where
    the task has no such sentences, or needs all of the context."""
    documents: tuple[str, ...] = ()
    """The documents that stand in the context, in order; empty where there are none."""

    @property
    def prompt(self) -> str:
        """The whole text that the answer follows."""
        return f"{self.context}{self.question}{self.answer_prefix}"


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A kind of question. Fields made with `setting()` can be changed by users (`make_task`)."""

    text: ClassVar[str] = PLAIN
    """Which words its samples are made of: PLAIN or TINY."""

    name: str

    @abstractmethod
    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`: at most `length` tokens by `count`, and close to it if possible.

        The same arguments give the same sample, in any process. Raises ConfigError for a length
        into which the task does not fit.
        """

    @abstractmethod
    def score(self, sample: Sample, generated: str) -> float:
        """How right the text that a model wrote after the prompt is, from 0 to 1."""

    def random(self, length: int, seed: int, what: str = "") -> Random:
        """The random numbers of a sample; settings such as a depth leave them as they are.

        what: a name for a stream of its own, so that one choice does not disturb another.
        """
        require_sample(length, seed)
        return Random(f"{self.name}/{length}/{seed}/{what}")


def require_sample(length: object, seed: object) -> None:
    """Raises ConfigError unless they are a length in tokens and the number of a sample."""
    require(is_count(length), "length", length, "a whole number of tokens, at least 1")
    require(is_count(seed, 0), "seed", seed, "a whole number, at least 0")


def require_depth(depth: object) -> None:
    """Raises ConfigError unless `depth` is None or a number from 0 to 1."""
    good = depth is None or (is_number(depth) and 0 <= float(str(depth)) <= 1)
    require(good, "depth", depth, "a number from 0 (start of the context) to 1 (its end)")

"""Aggregation: RULER's common words and frequent words, which need the whole text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from keyhole.eval.tasks.base import (
    CountTokens,
    Sample,
    Task,
    Written,
    fitted,
    room_for,
)
from keyhole.eval.tasks.materials import NOUNS, Stream, unique, vocabulary

_COMMON = 10
_COMMON_TOKENS = 120
_LONG = 4096
_COMMON_INSTRUCTION = (
    "Here is a numbered list of words. Some of them stand there more often than the others; "
    "remember those.\n"
)
_COMMON_QUESTION = "\nQuestion: Which 10 words are the most common ones in the list above?"
_COMMON_PREFIX = " Answer: The 10 words that the list has most often are:"


@dataclass(frozen=True, kw_only=True)
class _WordList:
    """The word list of a prompt: the words in order, and the common ones."""

    words: list[str]
    common: tuple[str, ...]

    @property
    def context(self) -> str:
        return _COMMON_INSTRUCTION + _numbered(self.words)


@dataclass(frozen=True, kw_only=True)
class CommonWords(Task):
    """Name the most frequent words of a list.

    RULER's common words (`cwe`): the ten words that are most frequent in a long numbered list.

    Ten words occur 30 times each, the others 3 times; below 4,096 tokens, 6 times and once. A
    solved example comes first: 40 words, 10 and 3 times (20 words, 3 times and once). RULER (COLM
    2024), section 3.3; 120 new tokens, scored by string_match_all.

    Differences: templates are reworded; the words are from our own list and, beyond it, pairs of
    nouns. No word contains one of the answers, which would count as having found it. More than 120
    new tokens if a tokenizer needs them.
    """

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the whole list is needed, so there are no depths."""
        often, seldom, size, example_often, example_seldom = (
            (30, 3, 40, 10, 3) if length >= _LONG else (6, 1, 20, 3, 1)
        )
        rng = self.random(length, seed, "example")
        shown = _list(Stream(vocabulary(rng).__next__), rng, size, example_often, example_seldom)
        example = f"{shown.context}{_COMMON_QUESTION}{_COMMON_PREFIX} {_numbered(shown.common)}\n"
        words = Stream(vocabulary(self.random(length, seed, "words")).__next__)

        def write(size: int) -> Written:
            listed = _list(words, self.random(length, seed), size, often, seldom)
            return Written(
                context=f"{example}{listed.context}",
                question=_COMMON_QUESTION,
                answer_prefix=_COMMON_PREFIX,
                answers=listed.common,
                max_new_tokens=room_for(_numbered(listed.common), count, _COMMON_TOKENS),
            )

        most = len(NOUNS) * (len(NOUNS) - 1)
        return fitted(self.name, length, seed, count, write, least=2 * _COMMON, most=most)


def _list(words: Stream[str], rng: Random, size: int, often: int, seldom: int) -> _WordList:
    """`size` words or slightly fewer, of which ten are drawn as the common ones."""
    known = words.first(size)
    common: list[str] = []
    for word in rng.sample(known, size):
        if len(common) < _COMMON and not any(word in other or other in word for other in common):
            common.append(word)
    others = [word for word in known if not any(one in word for one in common)]
    text = common * often + others * seldom
    rng.shuffle(text)
    return _WordList(words=text, common=tuple(common))


def _numbered(words: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


CWE = CommonWords(name="cwe")


_LETTERS = 6
_ASKED = 3
_FREQUENT_TOKENS = 50
_DOTS = "..."
_ZETA_2 = math.pi**2 / 6
_LEAST = 60
"""Fewest words for which the three answers and the next word all occur differently often."""
_FREQUENT_INSTRUCTION = (
    "The text below is in code. Watch how often each word of it appears and find the three most "
    "frequent ones. "
)
_FREQUENT_QUESTION = (
    "\nQuestion: Without explaining anything, and leaving out the dots '...': which three words "
    "appear most often in the text above?"
)
_FREQUENT_PREFIX = " Answer: The three words that appear most often in the text above are:"


@dataclass(frozen=True, kw_only=True)
class FrequentWords(Task):
    """Name the most frequent words of a coded text.

    RULER's frequent words (`fwe`): the three most frequent words of a coded text.

    Words of six random letters follow a zeta distribution: the share of the k-th word is k^-2 /
    zeta(2). The first is written as dots, and does not count; the next three are the answer. The
    number of different words is a fiftieth of the tokens. RULER (COLM 2024), section 3.3 and its
    `synthetic.yaml` (alpha 2); 50 new tokens, scored by string_match_all.

    Differences: templates are reworded; each sample is filled separately.
    """

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the whole text is needed, so there are no depths."""
        rng = self.random(length, seed)
        draw = unique(lambda: "".join(rng.choices(ascii_lowercase, k=_LETTERS)))
        words = [draw() for _ in range(max((length - _FREQUENT_TOKENS) // 50, _ASKED + 2))]
        answers = tuple(words[1 : _ASKED + 1])
        new_tokens = room_for(" ".join(answers), count, _FREQUENT_TOKENS)

        def write(size: int) -> Written:
            text = _coded(words, size)
            self.random(length, seed, "order").shuffle(text)
            return Written(
                context=_FREQUENT_INSTRUCTION + " ".join(text),
                question=_FREQUENT_QUESTION,
                answer_prefix=_FREQUENT_PREFIX,
                answers=answers,
                max_new_tokens=new_tokens,
            )

        return fitted(self.name, length, seed, count, write, least=_LEAST)


def _coded(words: Sequence[str], size: int) -> list[str]:
    """About `size` words in the order of their frequency."""
    text: list[str] = []
    for rank, word in enumerate([_DOTS, *words[1:]], start=1):
        text += [word] * int(size / rank**2 / _ZETA_2)
    return text


FWE = FrequentWords(name="fwe")

"""RULER's common words (`cwe`): the ten words that a long numbered list has most often.

Ten words stand there 30 times each, the others 3 times; below 4,096 tokens 6 times and once. A
solved example stands first: 40 words, 10 and 3 times (20, 3 and 1). RULER (COLM 2024), section
3.3; 120 new tokens, scored by string_match_all.

Differences: templates are reworded; the words are our own list and, beyond it, pairs of nouns. No
word contains one of the answers, which would count as having found it. More than 120 new tokens
where a tokenizer needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from keyhole.eval.tasks.base import CountTokens, Sample, Task
from keyhole.eval.tasks.common.fitting import Written, fitted, room_for
from keyhole.eval.tasks.common.scores import string_match_all
from keyhole.eval.tasks.common.words import NOUNS, Stream, vocabulary

_COMMON = 10
_NEW_TOKENS = 120
_LONG = 4096
_INSTRUCTION = (
    "Here is a numbered list of words. Some of them stand there more often than the others; "
    "remember those.\n"
)
_QUESTION = "\nQuestion: Which 10 words are the most common ones in the list above?"
_PREFIX = " Answer: The 10 words that the list has most often are:"


@dataclass(frozen=True, kw_only=True)
class _WordList:
    """A list of words to be written: the words in order, and the common ones."""

    words: list[str]
    common: tuple[str, ...]

    @property
    def context(self) -> str:
        return _INSTRUCTION + _numbered(self.words)


@dataclass(frozen=True, kw_only=True)
class CommonWords(Task):
    """Name the most frequent words of a list."""

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the whole list is needed, so there are no depths."""
        often, seldom, size, example_often, example_seldom = (
            (30, 3, 40, 10, 3) if length >= _LONG else (6, 1, 20, 3, 1)
        )
        rng = self.random(length, seed, "example")
        shown = _list(Stream(vocabulary(rng).__next__), rng, size, example_often, example_seldom)
        example = f"{shown.context}{_QUESTION}{_PREFIX} {_numbered(shown.common)}\n"
        words = Stream(vocabulary(self.random(length, seed, "words")).__next__)

        def write(size: int) -> Written:
            listed = _list(words, self.random(length, seed), size, often, seldom)
            return Written(
                context=f"{example}{listed.context}",
                question=_QUESTION,
                answer_prefix=_PREFIX,
                answers=listed.common,
                new_tokens=room_for(_numbered(listed.common), count, _NEW_TOKENS),
            )

        most = len(NOUNS) * (len(NOUNS) - 1)
        return fitted(self.name, length, seed, count, write, least=2 * _COMMON, most=most)

    def score(self, sample: Sample, generated: str) -> float:
        """Share of the common words that were named."""
        return string_match_all(sample.answers, generated)


def _list(words: Stream[str], rng: Random, size: int, often: int, seldom: int) -> _WordList:
    """`size` words, or a few less, of which ten are drawn to be common."""
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

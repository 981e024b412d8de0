"""Filling a prompt's pages with stored documents, in units that may be spread over several steps.

Before each unit the work yields that unit's kind, and the pace decides whether the unit still
fits into the current step. The pages depend on the order of the units alone, not on which step runs
them.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.kept_tokens import NO_PAGE, PageList
from keyhole.documents.store import StoredDocument
from keyhole.reuse.base import Reuse


@dataclass(frozen=True, eq=False)
class Context:
    """What stands before the question: a prefix, documents, and what separates them.

    offsets: position of each document's first token. end: position of the question's first token.
    num_prefix: tokens of the prefix.
    """

    documents: tuple[StoredDocument, ...]
    offsets: tuple[int, ...]
    end: int
    num_prefix: int
    reuse: Reuse

    @property
    def positions(self) -> np.ndarray:
        """Positions of all tokens of the documents, in order: int64 [T]."""
        parts = [
            np.arange(offset, offset + document.length)
            for document, offset in zip(self.documents, self.offsets, strict=True)
        ]
        return np.concatenate(parts).astype(np.int64)

    @property
    def separators(self) -> np.ndarray:
        """Positions that belong neither to the prefix nor to a document: int64."""
        rest = np.arange(self.num_prefix, self.end)
        return rest[~np.isin(rest, self.positions)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Reused:
    """What a prompt took from the store.

    documents: their names, in order. lengths: tokens of each. shares: SamKV's P of each, None for
    other methods. sequence_ratio: kept tokens / tokens of the documents, mean over layers.
    recompute_ratio: those computed again in some layer / all. tokens_not_computed: the others.
    bytes_read: from the store, block statistics included. kept: bool [L, T], what each layer keeps
    of all tokens of documents. written: bool [L, T], what each layer computed again of these.
    """

    documents: Sequence[str]
    lengths: Sequence[int]
    shares: tuple[float, ...] | None
    sequence_ratio: float
    recompute_ratio: float
    tokens_not_computed: int
    bytes_read: int
    kept: Tensor
    written: Tensor


@dataclass(frozen=True, eq=False)
class Filled:
    """What a prompt has before its question.

    end: tokens. kept: bool [L, end], what each layer has of them; None: everything.
    reused: what it cost.
    """

    end: int
    kept: Tensor | None
    reused: Reused


#: Yields the kind of each unit before it runs, and returns what came of all.
Units = Generator[str, None, Filled]


class OutOfPages(Exception):  # noqa: N818 - a signal, like StopIteration
    """Fewer pages are left than filling needs now."""


class Filling:
    """The pages of one request, and what is still to be done to fill them.

    filled: what they hold, when all is done; None before.
    """

    def __init__(self, pages: PageList, units: Units) -> None:
        self.filled: Filled | None = None
        self._pages = pages
        self._units = units

    def run(self, pace: Pace) -> None:
        """Goes on as long as `pace` says, by one unit at least.

        Raises OutOfPages, and what filling raises; `release` is all that can come then.
        """
        assert self.filled is None, "it is filled already"
        try:
            pace.resume()
            goes_on = True
            while goes_on:
                with torch.no_grad():
                    kind = next(self._units)
                goes_on = pace.goes_on(kind)
        except StopIteration as done:
            self.filled = done.value

    def release(self) -> None:
        """Gives the pages back and ends the work."""
        self._units.close()
        self._pages.release()

    def take(self) -> list[int]:
        """The entries of the pages up to the question, as a sequence keeps them."""
        assert self.filled is not None, "it is not filled yet"
        return self._pages.listed(self.filled.end)

    @property
    def held(self) -> list[int]:
        """The pages that are held."""
        return [int(page) for page in self._pages.present() if page != NO_PAGE]


# How much of a step goes to stored documents: little while others decode, all of it alone.
#
# Filling a prompt's documents is cut into units, and the time that each kind of unit takes is
# remembered. Beside decoding sequences a step goes on with units until its target is reached, which
# is below twice the median of the steps before, by what a busy machine adds. How many tokens a unit
# computes follows from how long the last ones took.


#: A step may take this many times the median, with what it fills; below 2 by what noise adds.
_TARGET = 1.5
#: Steps that the median is taken over.
_STEPS = 31
#: The share of a median step that one forward takes: fewer tokens above, more below.
_MOST_OF_STEP, _LEAST_OF_STEP = 0.6, 0.4
#: Tokens of the first forward, and the fewest of any: fewer take about as long.
_LEAST_TOKENS = 4
_MULTIPLE = 4
_MOST_TOKENS = 1 << 20
#: Seconds of a step in which nobody else runs: others may add requests between steps.
_ALONE_S = 0.05
#: How fast the longest unit of a kind is forgotten, per unit.
_FADE = 0.7


class Pace:
    """The clock of steps and of what is filled in them.

    tokens: how many of a prompt are computed at once beside decoding sequences.
    """

    def __init__(self) -> None:
        self.tokens = _LEAST_TOKENS
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._units: dict[str, float] = {}
        self._kind = ""
        self._begin = self._last = 0.0
        self._share: float | None = None

    def decoded(self, seconds: float) -> None:
        """A step took so long without what was filled in it, and computed no prompts."""
        self._steps.append(seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that decoded took so long, and computed so many tokens of a question."""
        if self._steps:
            median = statistics.median(self._steps)
            self._adapt(tokens, seconds - median, median)

    def encoded(self, tokens: int, seconds: float) -> None:
        """So many tokens of a document were encoded between two steps, in this time."""
        if tokens and self._steps:
            self._adapt(tokens, seconds, statistics.median(self._steps))

    def begin(self, *, spent: float, alone: bool, only_decodes: bool) -> bool:
        """Begins the part of a step that fills documents; False: there is no time for it.

        spent: seconds of the step so far. alone: nobody else runs.
        only_decodes: the step computed no prompts, which take longer than a decode step anyway.
        """
        self._begin = self._last = time.perf_counter()
        if alone:
            self._share = None
            return True
        if only_decodes and self._steps:
            self._share = _TARGET * statistics.median(self._steps) - spent
        else:
            self._share = (_TARGET - 1) * spent
        return self._share > 0

    def goes_on(self, kind: str) -> bool:
        """Called between two units: whether one of this kind still fits into the step."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        if self._share is None:
            self._kind = kind
            return now - self._begin < _ALONE_S
        if self._kind:
            before = self._units.get(self._kind, 0.0)
            self._units[self._kind] = max(took, _FADE * before)
        self._kind = kind
        return now - self._begin + self._units.get(kind, 0.0) <= self._share

    def resume(self) -> None:
        """Goes on with the unit that was announced last, maybe in another step."""
        self._last = time.perf_counter()

    def size(self, left: int, most: int) -> int:
        """How many of `left` tokens the next forward of filling computes, at most `most`."""
        return min(left, most) if self._share is None else self.part(left, most)

    def part(self, left: int, most: int) -> int:
        """How many of `left` tokens are computed at once beside decoding, at most `most`.

        Whole multiples, and no small rest: matrix products of one to three rows round otherwise,
        and cost as much as of four.
        """
        size = min(most, self.tokens // _MULTIPLE * _MULTIPLE)
        return size if left >= size + _MULTIPLE else min(left, most)

    def forward(self, tokens: int, seconds: float) -> None:
        """A forward of so many tokens took so long."""
        if self._share is not None:
            self._adapt(tokens, seconds, statistics.median(self._steps or [self._share]))

    def _adapt(self, tokens: int, seconds: float, median: float) -> None:
        """A quarter fewer tokens next time if they took too long, a quarter more if they did not.

        median: seconds of a step without them.
        """
        if seconds > _MOST_OF_STEP * median:
            self.tokens = max(_LEAST_TOKENS, 3 * min(self.tokens, tokens) // 4)
        elif seconds < _LEAST_OF_STEP * median and tokens >= self.tokens - _MULTIPLE:
            self.tokens = min(_MOST_TOKENS, self.tokens + self.tokens // 4)

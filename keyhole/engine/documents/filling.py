"""Filling a prompt's pages with stored documents, in units that may be spread over several steps.

Before each unit the generator yields the unit's kind, and `Pace` decides whether the unit still
fits into the current step. The contents of the pages depend only on the order of the units, not on
the steps that run them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.packing import Packing
from keyhole.cache.page_list import NO_PAGE, PageList
from keyhole.cache.unpaged_keys import UnpagedTokens
from keyhole.documents.store import StoredDocument
from keyhole.errors import ConfigError
from keyhole.policies.base import Policy
from keyhole.reuse.base import RecomputePlan, Reuse


@dataclass(frozen=True, eq=False)
class Context:
    """The tokens before the question: a prefix, documents and separators.

    offsets: position of each document's first token. end: position of the question's first token.
    num_prefix: tokens of the prefix. adapter: the number of the request's LoRA adapter, 0 for none.
    """

    documents: tuple[StoredDocument, ...]
    offsets: tuple[int, ...]
    end: int
    num_prefix: int
    reuse: Reuse
    adapter: int = 0

    @property
    def positions(self) -> np.ndarray:
        """Positions of all tokens of the documents, in order: int64 [T]."""
        parts = [
            np.arange(offset, offset + document.length)
            for document, offset in zip(self.documents, self.offsets, strict=True)
        ]
        return np.concatenate(parts).astype(np.int64)

    def spread(self, marks: Tensor, out: Tensor) -> None:
        """Copies marks of documents' tokens, bool [L, T], to their positions in [L, end]."""
        done = 0
        for document, offset in zip(self.documents, self.offsets, strict=True):
            stop = done + document.length
            out[:, offset : offset + document.length] = marks[:, done:stop]
            done = stop

    def check(self, policy: Policy) -> None:
        """Raises ConfigError unless the method supports the documents and the policy."""
        wanted = getattr(self.reuse, "block_size", None)
        for document in self.documents:
            if wanted is not None and document.block_size != wanted:
                raise ConfigError(
                    f"block_size {wanted} of reuse method {self.reuse.name!r} must be "
                    f"{document.block_size}, with which document {document.info.name!r} was encoded"
                )
        if policy.reads_queries:
            raise ConfigError(
                f"policy {policy.name!r} needs the queries of a prompt, but documents are stored "
                "without their queries; use reuse='recompute', or another policy"
            )
        if not policy.shares_pages and not self.reuse.keeps_all:
            raise ConfigError(
                f"policy {policy.name!r} needs every token of a prompt, but reuse method "
                f"{self.reuse.name!r} may drop some; use reuse='recompute', 'reuse', "
                "'cacheblend' or 'epic', or another policy"
            )

    @property
    def separators(self) -> np.ndarray:
        """Positions that belong neither to the prefix nor to a document: int64."""
        rest = np.arange(self.num_prefix, self.end)
        return rest[~np.isin(rest, self.positions)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Reused:
    """What a prompt reused of stored documents.

    documents: their names, in order. digests: SHA-256 of the source of each. lengths: tokens of
    each. shares: SamKV's P of each, None for other methods. sequence_ratio: kept tokens / tokens
    of the documents, mean over layers.
    held_ratio: tokens of a layer for which pages are held / tokens of the documents.
    recompute_ratio: those computed again in some layer / all. tokens_not_computed: the number of
    tokens that were not computed again. bytes_read: from the store, block statistics included.
    kept: bool [L, T], what each layer keeps of all tokens of documents. recomputed: bool [L, T],
    what each layer computed again of these.
    """

    documents: Sequence[str]
    digests: Sequence[str]
    lengths: Sequence[int]
    shares: tuple[float, ...] | None
    sequence_ratio: float
    held_ratio: float
    recompute_ratio: float
    tokens_not_computed: int
    bytes_read: int
    kept: Tensor
    recomputed: Tensor

    @classmethod
    def of(
        cls,
        documents: Sequence[StoredDocument],
        plan: RecomputePlan,
        *,
        num_held: int,
        bytes_read: int,
    ) -> Self:
        """Of what a plan keeps and computes again; num_held: tokens of a layer with a page."""
        again = plan.recomputed.any(0)
        return cls(
            documents=[document.info.name for document in documents],
            digests=[document.digest for document in documents],
            lengths=[document.length for document in documents],
            shares=plan.shares,
            sequence_ratio=float(plan.kept.float().mean()),
            held_ratio=num_held / plan.kept.shape[1],
            recompute_ratio=float(again.float().mean()),
            tokens_not_computed=int((~again).sum()),
            bytes_read=bytes_read,
            kept=plan.kept,
            recomputed=plan.recomputed,
        )


@dataclass(frozen=True, eq=False)
class Filled:
    """The result of filling.

    end: the tokens before the question. kept: bool [L, end], those that each layer has, by place
    if they are packed; None: all. packing: their places; None: each is at its position. unpaged:
    the retrieval head's keys of tokens without a page. reused: the statistics.
    """

    end: int
    kept: Tensor | None
    packing: Packing | None
    unpaged: UnpagedTokens | None
    reused: Reused


#: Yields the kind of each unit before running it, and returns the result.
Units = Generator[str, None, Filled]


class OutOfPages(Exception):  # noqa: N818 - a signal, like StopIteration
    """Too few pages are free for the next unit."""


Result = TypeVar("Result")


class PacedUnits(Generic[Result]):
    """The remaining units of work on the pages of one request, and their result.

    units: yields the kind of each unit before running it, and returns the result.
    """

    def __init__(self, units: Generator[str, None, Result]) -> None:
        self._units, self._next = units, ""
        self.is_done = False
        self._result: Result | None = None

    def run(self, pace: Pace) -> None:
        """Runs units as long as `pace` allows, at least one.

        Raises OutOfPages and the errors of units; after an error only `close` may be called.
        """
        assert not self.is_done, "all units have run already"
        try:
            pace.resume(self._next)
            goes_on = True
            while goes_on:
                with torch.no_grad():
                    self._next = next(self._units)
                goes_on = pace.goes_on(self._next)
        except StopIteration as done:
            self.is_done, self._result = True, done.value

    def close(self) -> None:
        """Discards the remaining units."""
        self._units.close()


class Filling(PacedUnits[Filled]):
    """The pages of one request and the remaining units that fill them with its documents."""

    def __init__(self, pages: PageList, units: Units) -> None:
        super().__init__(units)
        self._pages = pages

    @property
    def filled(self) -> Filled | None:
        """The result; None until it is complete."""
        return self._result

    def release(self) -> None:
        """Releases the pages and discards the remaining units."""
        self.close()
        self._pages.release()
        if self.filled is not None and self.filled.unpaged is not None:
            self.filled.unpaged.release()

    def take(self) -> list[int]:
        """The page list up to the question, for the sequence."""
        assert self.filled is not None, "filling is not complete yet"
        return self._pages.listed(self.filled.end)

    @property
    def held(self) -> list[int]:
        """The pages that it holds."""
        return [int(page) for page in self._pages.present() if page != NO_PAGE]


# The time of a step that is spent on units: little while sequences decode, all of it
# otherwise.
#
# The duration of each kind of unit is recorded. While sequences decode, a step runs units until its
# target is reached, which leaves a margin below twice the median of earlier steps for noise. The
# first unit of a kind, whose duration is unknown, is the only one of its step. The tokens of a
# forward pass adapt to the duration of the last ones.


#: The target of a step with filling, in medians; the limit is 2, the rest is for noise.
_TARGET = 1.4
#: The number of steps of the median.
_STEPS = 31
#: The bounds of a forward pass's share of a median step: fewer tokens above, more below.
_MOST_OF_STEP, _LEAST_OF_STEP = 0.6, 0.4
#: The tokens of the first forward pass, and the minimum: fewer take about as long.
_LEAST_TOKENS = 4
_MULTIPLE = 4
_MOST_TOKENS = 1 << 20
#: Seconds of a step without other requests; requests can be added between steps.
_ALONE_S = 0.05
#: The decay of a kind's longest duration, per unit of that kind.
_FADE = 0.7


class Pace:
    """Measures steps and units, and decides how much is filled in a step.

    tokens: the prompt tokens of a forward pass while sequences decode.
    """

    def __init__(self) -> None:
        self.tokens = _LEAST_TOKENS
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._units: dict[str, float] = {}
        self._kind = ""
        self._begin = self._last = 0.0
        self._share: float | None = None

    def decoded(self, seconds: float) -> None:
        """Records the duration of a step of decoding sequences alone, without filling."""
        self._steps.append(seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """Records the duration of a decode step that also computed `tokens` of a question."""
        if self._steps:
            median = statistics.median(self._steps)
            self._adapt(tokens, seconds - median, median)

    def encoded(self, tokens: int, seconds: float) -> None:
        """Records the duration of encoding `tokens` of a document between two steps."""
        if tokens and self._steps:
            self._adapt(tokens, seconds, statistics.median(self._steps))

    def begin(self, *, spent: float, alone: bool, only_decodes: bool) -> bool:
        """Begins the part of a step that fills pages; False: no time is left for it.

        spent: seconds of the step so far. alone: no other request runs.
        only_decodes: the step computed no prompt tokens.
        """
        self._begin = self._last = time.perf_counter()
        if alone:
            self._share = None
            return True
        if only_decodes and self._steps:
            self._share = _TARGET * statistics.median(self._steps) - spent
        else:
            self._share = (_TARGET - 1) * spent
        return self._share > 0 and not self._must_wait(spent)

    def _must_wait(self, spent: float) -> bool:
        """Whether the announced unit would exceed the target only as this step is a slow one.

        Half of the steps are not, so a unit that is longer than any step has left still runs.
        """
        assert self._share is not None
        slow = bool(self._steps) and spent > statistics.median(self._steps)
        return slow and self._units.get(self._kind, 0.0) > self._share

    def goes_on(self, kind: str) -> bool:
        """Called before each unit: whether one of this kind still fits into the step."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        if self._share is None:
            self._kind = kind
            return now - self._begin < _ALONE_S
        if self._kind:
            before = self._units.get(self._kind, 0.0)
            self._units[self._kind] = max(took, _FADE * before)
        self._kind = kind
        return now - self._begin + self._units.get(kind, math.inf) <= self._share

    def resume(self, kind: str) -> None:
        """Starts the clock of a unit that was announced before, maybe in an earlier step."""
        self._kind, self._last = kind, time.perf_counter()

    @property
    def is_alone(self) -> bool:
        """Whether no other request waits for the units of this step."""
        return self._share is None

    def size(self, left: int, most: int) -> int:
        """The tokens of the next forward pass of filling: of `left`, at most `most`."""
        return min(left, most) if self._share is None else self.part(left, most)

    def part(self, left: int, most: int) -> int:
        """The tokens of a forward pass while sequences decode: of `left`, at most `most`.

        A multiple of four, without a small rest: matrix products of one to three rows round
        differently and cost as much as those of four.
        """
        size = min(most, self.tokens // _MULTIPLE * _MULTIPLE)
        return size if left >= size + _MULTIPLE else min(left, most)

    def forward(self, tokens: int, seconds: float) -> None:
        """Records the duration of a forward pass of filling."""
        if self._share is not None:
            self._adapt(tokens, seconds, statistics.median(self._steps or [self._share]))

    def _adapt(self, tokens: int, seconds: float, median: float) -> None:
        """Lowers or raises `tokens` by a quarter if the last ones took too long or short.

        median: seconds of a step without them.
        """
        if seconds > _MOST_OF_STEP * median:
            self.tokens = max(_LEAST_TOKENS, 3 * min(self.tokens, tokens) // 4)
        elif seconds < _LEAST_OF_STEP * median and tokens >= self.tokens - _MULTIPLE:
            self.tokens = min(_MOST_TOKENS, self.tokens + self.tokens // 4)

"""Page lists of sequences that do not hold all their pages: prompts with gaps, evicted pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.kept_tokens import KeptTokenRows
from keyhole.cache.pages import PageCache

#: Marks a missing page in a sequence's list of pages.
NO_PAGE = -1


class PageList:
    """Pages of one sequence by position, allocated on demand."""

    def __init__(self, cache: PageCache, length: int) -> None:
        self._cache = cache
        self._size = cache.page_size
        self._pages = np.full(-(-length // self._size), NO_PAGE, np.int64)
        self._fresh: list[int] = []

    def need(self, positions: np.ndarray) -> bool:
        """Allocates pages for these positions; returns False, with nothing changed, without space.

        `clear` comes next: new pages hold what their former owner left there.
        """
        wanted = self._missing(positions)
        fresh = self._cache.allocate(len(wanted))
        if fresh is None:
            return False
        self._pages[wanted] = fresh
        self._fresh = fresh
        return True

    def num_missing(self, positions: np.ndarray) -> int:
        """How many pages `need` would allocate for these positions."""
        return len(self._missing(positions))

    def clear(self) -> Iterator[None]:
        """Zeroes the pages of the last `need`, a layer at each step of the iteration.

        Summaries of a page then see nothing of its former owner; without summaries there is
        nothing to do.
        """
        fresh, self._fresh = self._fresh, []
        if not any(self._cache.data) or not fresh:
            return
        for layer in range(len(self._cache.keys)):
            keys, values = self._cache.keys[layer], self._cache.values[layer]
            index = torch.tensor(fresh, device=keys.device)
            keys[index] = 0
            values[index] = 0
            yield

    def _missing(self, positions: np.ndarray) -> np.ndarray:
        """The entries without a page, of those that these positions need."""
        wanted = np.unique(positions // self._size)
        missing: np.ndarray = wanted[self._pages[wanted] == NO_PAGE]
        return missing

    def keep(self, positions: np.ndarray) -> None:
        """Frees all pages except those of these positions."""
        wanted = np.zeros(len(self._pages), bool)
        wanted[np.unique(positions // self._size)] = True
        gone = self._pages[~wanted & (self._pages != NO_PAGE)]
        self._pages[~wanted] = NO_PAGE
        self._cache.release(gone.tolist())

    def release(self) -> None:
        """Frees all pages."""
        self.keep(np.zeros(0, np.int64))

    def slots(self, positions: np.ndarray) -> np.ndarray:
        """Where the tokens at these positions are, int64: page * page_size + place."""
        pages = self._pages[positions // self._size]
        assert (pages != NO_PAGE).all(), "a page is missing"
        slots: np.ndarray = pages * self._size + positions % self._size
        return slots

    def table(self) -> np.ndarray:
        """Physical pages by position, int64; a gap is page 0, which is never read."""
        return np.maximum(self._pages, 0)

    def present(self) -> np.ndarray:
        """The allocated physical pages, int64."""
        there: np.ndarray = self._pages[self._pages != NO_PAGE]
        return there

    def listed(self, length: int) -> list[int]:
        """The entries of the first `length` tokens, gaps included, as a sequence's list."""
        count = -(-length // self._size)
        assert (self._pages[count:] == NO_PAGE).all(), "a page would be lost"
        return [int(page) for page in self._pages[:count]]


@dataclass(frozen=True)
class RetainedPages:
    """Pages that full-attention layers still read, as a compact list.

    Keys are rotated to their true positions, so attention needs only the order and number of the
    pages. W: the most entries of any sequence.

    page_table: int32 [B, W], physical pages; the rest of a row is 0. pages: int32 [B], entries.
    lengths: int32 [B], tokens in them, the newest included. pinned: int64 [B], how many of the
    first entries belong to the prompt and are never evicted. goes: bool [B], `due` on the device.
    entries: int64 [B, W], on the host: which page of the sequence each one is; the rest is -1.
    most_generated: the most entries of any sequence that are not pinned.
    due: bool [B], on the host: sequences that evict a page before their next token.
    kept_tokens: as in `Step`, with these lengths.
    """

    page_table: Tensor
    pages: Tensor
    lengths: Tensor
    pinned: Tensor
    goes: Tensor
    entries: np.ndarray
    most_generated: int
    due: np.ndarray
    kept_tokens: KeptTokenRows | None = None

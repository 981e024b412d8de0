"""The page list of a prompt with gaps: pages exist only where tokens are kept."""

from __future__ import annotations

import numpy as np
import torch

from keyhole.cache.pages import PageCache

#: Marks a missing page in a sequence's list of pages.
NO_PAGE = -1


class PageList:
    """Pages of one sequence by position, allocated on demand."""

    def __init__(self, cache: PageCache, length: int) -> None:
        self._cache = cache
        self._size = cache.page_size
        self._pages = np.full(-(-length // self._size), NO_PAGE, np.int64)

    def need(self, positions: np.ndarray) -> bool:
        """Allocates pages for these positions; returns False, with nothing changed, without space.

        New pages hold zeros, so that page summaries do not include an earlier owner's data.
        """
        wanted = np.unique(positions // self._size)
        wanted = wanted[self._pages[wanted] == NO_PAGE]
        fresh = self._cache.allocate(len(wanted))
        if fresh is None:
            return False
        self._pages[wanted] = fresh
        if any(self._cache.data) and fresh:
            for keys, values in zip(self._cache.keys, self._cache.values, strict=True):
                index = torch.tensor(fresh, device=keys.device)
                keys[index] = 0
                values[index] = 0
        return True

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

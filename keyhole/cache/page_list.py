"""The pages of a prompt that has holes: there where something is kept, else absent."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from keyhole.cache.pages import PageCache

#: Stands in a sequence's list of pages where there is none.
NO_PAGE = -1


class PageList:
    """Pages of one sequence by position, allocated as they are needed."""

    def __init__(self, cache: PageCache, length: int) -> None:
        self._cache = cache
        self._size = cache.page_size
        self._pages = np.full(-(-length // self._size), NO_PAGE, np.int64)
        self._fresh: list[int] = []

    def need(self, positions: np.ndarray) -> bool:
        """Makes sure that there are pages for these positions; False (nothing changed): none left.

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
        """Gives back all pages but those of these positions."""
        wanted = np.zeros(len(self._pages), bool)
        wanted[np.unique(positions // self._size)] = True
        gone = self._pages[~wanted & (self._pages != NO_PAGE)]
        self._pages[~wanted] = NO_PAGE
        self._cache.release(gone.tolist())

    def release(self) -> None:
        """Gives all pages back."""
        self.keep(np.zeros(0, np.int64))

    def slots(self, positions: np.ndarray) -> np.ndarray:
        """Where the tokens at these positions are, int64: page * page_size + place."""
        pages = self._pages[positions // self._size]
        assert (pages != NO_PAGE).all(), "a page is missing"
        slots: np.ndarray = pages * self._size + positions % self._size
        return slots

    def table(self) -> np.ndarray:
        """Physical pages by position, int64; a hole is page 0, which nobody looks at."""
        return np.maximum(self._pages, 0)

    def present(self) -> np.ndarray:
        """The physical pages that are there, int64."""
        there: np.ndarray = self._pages[self._pages != NO_PAGE]
        return there

    def listed(self, length: int) -> list[int]:
        """The entries of the first `length` tokens, holes too, as a sequence keeps them."""
        count = -(-length // self._size)
        assert (self._pages[count:] == NO_PAGE).all(), "a page would be lost"
        return [int(page) for page in self._pages[:count]]

"""The page list of one sequence by position, with gaps.

A gap is where a page was evicted, or where no layer keeps a token of the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from keyhole.cache.huge_pages import HUGE_BYTES, is_lazy
from keyhole.cache.pages import PageCache

#: Free pages that a prompt of documents leaves for the next tokens of other requests.
_LEFT = 64
#: Marks a missing page in a sequence's list of pages.
NO_PAGE = -1


class PageList:
    """Pages of one sequence by position, allocated on demand."""

    def __init__(self, cache: PageCache, length: int) -> None:
        self._cache = cache
        self._size = cache.page_size
        self._pages = np.full(-(-length // self._size), NO_PAGE, np.int64)
        self._fresh: list[int] = []
        self._spare: list[int] = []

    def need(self, positions: np.ndarray) -> bool:
        """Allocates pages for these positions; returns False, with nothing changed, without space.

        Call `clear` next: new pages still hold the data of their former owner.
        """
        wanted = self._missing(positions)
        fresh = self._cache.allocate(len(wanted), leave=_LEFT)
        if fresh is None:
            return False
        self._pages[wanted] = fresh
        self._fresh = fresh
        return True

    def num_missing(self, positions: np.ndarray) -> int:
        """How many pages `need` would allocate for these positions."""
        return len(self._missing(positions))

    def clear(self) -> Iterator[None]:
        """Prepares the pages of the last `need`, a part of a layer at each step of the iteration.

        Zeroes them, so that summaries of a page see nothing of its former owner. Without summaries
        it writes one number of each page where the system provides memory at the first write, which
        can take as long as half a step: a part is one huge page.
        """
        fresh, self._fresh = self._fresh, []
        summaries = any(self._cache.data)
        for keys, values in zip(self._cache.keys, self._cache.values, strict=True):
            if not summaries and not is_lazy(keys):
                continue
            size = max(1, HUGE_BYTES // (keys.stride(0) * keys.itemsize))
            for start in range(0, len(fresh), size):
                index = torch.tensor(fresh[start : start + size], device=keys.device)
                if summaries:
                    keys[index] = 0
                    values[index] = 0
                else:
                    keys[index, 0, 0, 0] = 0
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

    def adopt(self, entries: Sequence[int], end: int) -> bool:
        """Replaces all pages by those of another sequence with the same tokens before `end`.

        entries: its page list up to `end`, gaps included. Full pages are shared, the last one is
        copied if `end` is within it, with zeros from `end` on. Returns False without space for the
        copy.
        """
        self.release()
        full, rest = divmod(end, self._size)
        fresh = self._cache.allocate(1 if rest else 0)
        if fresh is None:
            return False
        self._cache.share(page for page in entries[:full] if page != NO_PAGE)
        self._pages[:full] = entries[:full]
        if rest:
            self._pages[full] = fresh[0]
            self._cache.copy(entries[full:], fresh)
            for keys, values in zip(self._cache.keys, self._cache.values, strict=True):
                keys[fresh[0], :, rest:] = 0
                values[fresh[0], :, rest:] = 0
        return True

    def page(self, entry: int) -> int:
        """The physical page of an entry that has one."""
        assert self._pages[entry] != NO_PAGE, f"entry {entry} has no page"
        return int(self._pages[entry])

    def take(self, entry: int, page: int) -> None:
        """Replaces a page by another sequence's page with the same content."""
        own = int(self._pages[entry])
        if own != page:
            self._cache.share([page])
            self._pages[entry] = page
            self._cache.release([own] if own != NO_PAGE else [])

    def move(self, positions: np.ndarray) -> bool:
        """Moves the list to these positions; returns False, and changes nothing, without space.

        Pages of dropped positions are reused for new ones. The others stay until `settle`, so that
        the caller can copy from them through the former table. `clear` prepares new pages, as after
        `need`.
        """
        wanted = np.unique(positions // self._size)
        others = np.setdiff1d(np.flatnonzero(self._pages != NO_PAGE), wanted)
        missing = wanted[self._pages[wanted] == NO_PAGE]
        pages = self._pages[others].tolist()
        fresh = self._cache.allocate(max(0, len(missing) - len(pages)))
        if fresh is None:
            return False
        self._fresh = fresh
        pages += fresh
        self._pages[others] = NO_PAGE
        self._pages[missing] = pages[: len(missing)]
        self._spare = pages[len(missing) :]
        return True

    def settle(self) -> None:
        """Frees the pages that `move` left without a position."""
        self._cache.release(self._spare)
        self._spare = []

    def release(self) -> None:
        """Frees all pages."""
        self.settle()
        self.keep(np.zeros(0, np.int64))

    def slots(self, positions: np.ndarray) -> np.ndarray:
        """Where the tokens at these positions are, int64: page * page_size + place."""
        pages = self._pages[positions // self._size]
        assert (pages != NO_PAGE).all(), "a page is missing"
        slots: np.ndarray = pages * self._size + positions % self._size
        return slots

    def has(self, positions: np.ndarray) -> np.ndarray:
        """Whether the tokens at these positions have a page, bool."""
        there: np.ndarray = self._pages[positions // self._size] != NO_PAGE
        return there

    def table(self) -> np.ndarray:
        """Physical pages by position, int64; a gap is page 0, which is never read."""
        return np.maximum(self._pages, 0)

    def present(self) -> np.ndarray:
        """The allocated physical pages, int64."""
        return np.concatenate([self.listed_pages(), np.asarray(self._spare, np.int64)])

    def listed_pages(self) -> np.ndarray:
        """The physical pages that have a position, int64."""
        pages: np.ndarray = self._pages[self._pages != NO_PAGE]
        return pages

    def listed(self, length: int) -> list[int]:
        """The entries of the first `length` tokens, gaps included, as a sequence's list."""
        count = -(-length // self._size)
        assert (self._pages[count:] == NO_PAGE).all(), "a page would be lost"
        return [int(page) for page in self._pages[:count]]

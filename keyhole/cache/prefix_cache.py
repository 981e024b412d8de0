"""The prefix cache: full pages, found by the tokens up to their end.

A page is known by a digest of all tokens from the start of the sequence to the end of the page. The
index holds a reference to each cached page and releases the least recently used ones when pages run
out. Pages written by a sparse decode are *approximate*: they are returned only to requests that
allow it (a continued chat) under the same policy, never to a plain request, whose prompt is always
computed exactly. A *group* of requests has its own prefixes if its pages hold more than keys and
values.

Where a page's data also depend on the tokens after it (InfLLM's received attention), a page is
reused only if the pages that follow it in the prefix were inserted with it: those of another
sequence with the same tokens up to the page's end may have gone on differently.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from keyhole.cache.pages import PageCache

#: Pages whose tokens are converted at once: a long prompt is not copied as a whole.
_PIECE_PAGES = 1024


class _Origin(NamedTuple):
    """Which call inserted a page; maker: the policy that computed it, None if it is exact."""

    exact: bool
    maker: object
    insertion: int


class PrefixIndex:
    """Maps prefixes to pages."""

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache
        # digest -> page and origin, least recently used first
        self._pages: OrderedDict[bytes, tuple[int, _Origin]] = OrderedDict()
        self._insertions = itertools.count()

    def match(
        self,
        tokens: Sequence[int],
        *,
        end: int | None = None,
        approximate: bool = False,
        by: object = None,
        group: bytes = b"",
        reusable: Callable[[int, int], int] | None = None,
    ) -> tuple[list[int], bool]:
        """Cached pages of the longest prefix of `tokens[:end]`, and whether all of them are exact.

        The caller gets a reference to each. Approximate pages are returned only if allowed, and
        only those that `by` inserted. reusable: as `Policy.reusable`, how many of so many known
        tokens may be reused; None: all.
        """
        size = self._cache.page_size
        found: list[tuple[int, _Origin]] = []
        digests: list[bytes] = []
        for digest in prefix_digests(tokens, size, group, end):
            entry = self._pages.get(digest)
            if entry is None or not (entry[1].exact or (approximate and entry[1].maker == by)):
                break
            found.append(entry)
            digests.append(digest)
        self._touch(digests)
        count = len(found) if reusable is None else reusable(len(found) * size, size) // size
        after = len(found) - count  # pages on which the data of a page depend
        for i in range(count):
            origins = (found[j][1] for j in range(i + 1, i + 1 + after))
            if any(origin.insertion != found[i][1].insertion for origin in origins):
                count = i
                break
        pages = [page for page, _ in found[:count]]
        self._cache.share(pages)
        return pages, all(origin.exact for _, origin in found[:count])

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        num_exact: int,
        *,
        end: int | None = None,
        by: object = None,
        group: bytes = b"",
    ) -> None:
        """Inserts the full pages of `tokens[:end]`; tokens from `num_exact` on are approximate."""
        size = self._cache.page_size
        end = min(len(tokens) if end is None else end, len(pages) * size)
        digests = list(prefix_digests(tokens, size, group, end))
        insertion = next(self._insertions)
        origins = _Origin(False, by, insertion), _Origin(True, None, insertion)
        for i, (digest, page) in enumerate(zip(digests, pages, strict=False)):
            exact = (i + 1) * size <= num_exact
            known = self._pages.get(digest)
            if known is None or (exact and not known[1].exact):
                self._cache.share([page])
                self._pages[digest] = (page, origins[exact])
                if known is not None:
                    self._cache.release([known[0]])
        self._touch(digests)

    def evict(self, count: int) -> int:
        """Releases unshared pages, oldest first, until `count` are free; returns how many."""
        freed = 0
        for digest in list(self._pages):
            if freed >= count:
                break
            page = self._pages[digest][0]
            if self._cache.references(page) == 1:
                del self._pages[digest]
                self._cache.release([page])
                freed += 1
        return freed

    def clear(self) -> None:
        """Removes all entries."""
        self._cache.release(page for page, _ in self._pages.values())
        self._pages.clear()

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Renumbers pages that moved (`PageCache.pack`)."""
        for digest, entry in self._pages.items():
            self._pages[digest] = (numbers.get(entry[0], entry[0]), entry[1])

    @property
    def num_pages(self) -> int:
        """How many pages the index holds a reference to."""
        return len(self._pages)

    def held(self) -> list[int]:
        """The pages that the index holds a reference to."""
        return [page for page, _ in self._pages.values()]

    def _touch(self, digests: Sequence[bytes]) -> None:
        # A prefix's first pages serve all longer ones: they are touched last and evicted last.
        for digest in reversed(digests):
            self._pages.move_to_end(digest)


def prefix_digests(
    tokens: Sequence[int], page_size: int, group: bytes = b"", end: int | None = None
) -> Iterator[bytes]:
    """For each full page of `tokens[:end]` a digest of the tokens up to its end, and the group."""
    digest = group
    end = (len(tokens) if end is None else end) // page_size * page_size
    for first in range(0, end, _PIECE_PAGES * page_size):
        piece = tokens[first : min(end, first + _PIECE_PAGES * page_size)]
        for row in np.asarray(piece, dtype=np.int64).reshape(-1, page_size):
            digest = hashlib.blake2b(digest + row.tobytes(), digest_size=16).digest()
            yield digest

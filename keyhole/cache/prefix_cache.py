"""Prefixes that were computed before: full pages found again by the tokens up to their end.

A page is known by a digest of all tokens from the start of the sequence to the end of the page. The
index holds a reference to each page it knows and gives the least recently used back when pages run
out. Pages written by a sparse decode are *approximate*: they are given only to those who ask for it
(a chat that goes on), never to a plain request, whose prompt is always computed exactly.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from keyhole.cache.pages import PageCache


class PrefixIndex:
    """Which pages hold which prefixes."""

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache
        # digest -> (page, exact), least recently used first
        self._pages: OrderedDict[bytes, tuple[int, bool]] = OrderedDict()

    def match(self, tokens: Sequence[int], *, approximate: bool = False) -> tuple[list[int], bool]:
        """Known pages of the longest start of `tokens`, and whether all of them are exact.

        The caller gets a reference to each. Approximate pages are given only if asked for.
        """
        found: list[int] = []
        digests: list[bytes] = []
        all_exact = True
        for digest in _digests(tokens, self._cache.page_size):
            page, exact = self._pages.get(digest, (-1, False))
            if page < 0 or not (exact or approximate):
                break
            found.append(page)
            digests.append(digest)
            all_exact &= exact
        self._touch(digests)
        self._cache.share(found)
        return found, all_exact

    def insert(self, tokens: Sequence[int], pages: Sequence[int], num_exact: int) -> None:
        """Remembers the full pages of `tokens`; tokens from `num_exact` on are approximate."""
        size = self._cache.page_size
        digests = list(_digests(tokens, size))[: len(pages)]
        for i, (digest, page) in enumerate(zip(digests, pages, strict=False)):
            exact = (i + 1) * size <= num_exact
            known = self._pages.get(digest)
            if known is None or (exact and not known[1]):
                self._cache.share([page])
                self._pages[digest] = (page, exact)
                if known is not None:
                    self._cache.release([known[0]])
        self._touch(digests)

    def evict(self, count: int) -> int:
        """Gives up pages that nobody else uses, oldest first, until `count` are free; how many."""
        freed = 0
        for digest in list(self._pages):
            if freed >= count:
                break
            page, _ = self._pages[digest]
            if self._cache.references(page) == 1:
                del self._pages[digest]
                self._cache.release([page])
                freed += 1
        return freed

    def clear(self) -> None:
        """Forgets everything."""
        self._cache.release(page for page, _ in self._pages.values())
        self._pages.clear()

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Takes the new numbers of pages that moved (`PageCache.pack`)."""
        for digest, (page, exact) in self._pages.items():
            self._pages[digest] = (numbers.get(page, page), exact)

    def held(self) -> list[int]:
        """The pages that the index holds a reference to."""
        return [page for page, _ in self._pages.values()]

    def _touch(self, digests: Sequence[bytes]) -> None:
        # The start of a text is used by all that follow it: it is touched last and leaves last.
        for digest in reversed(digests):
            self._pages.move_to_end(digest)


def _digests(tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    digest = b""
    array = np.asarray(tokens, dtype=np.int64)
    for start in range(0, len(array) - page_size + 1, page_size):
        content = array[start : start + page_size].tobytes()
        digest = hashlib.blake2b(digest + content, digest_size=16).digest()
        yield digest

"""The prefix cache: full pages, found by the tokens up to their end.

A page is known by a digest of all tokens from the start of the sequence to the end of the page. The
index holds a reference to each cached page and releases the least recently used ones when pages run
out. Pages written by a sparse decode are *approximate*: they are returned only to requests that
allow it (a continued chat) under the same policy, never to a plain request, whose prompt is always
computed exactly. A *group* of requests has its own prefixes if its pages hold more than keys and
values.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from keyhole.cache.pages import PageCache


class PrefixIndex:
    """Maps prefixes to pages."""

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache
        # digest -> (page, exact, its owner if not exact), least recently used first
        self._pages: OrderedDict[bytes, tuple[int, bool, object]] = OrderedDict()

    def match(
        self,
        tokens: Sequence[int],
        *,
        approximate: bool = False,
        by: object = None,
        group: bytes = b"",
    ) -> tuple[list[int], bool]:
        """Cached pages of the longest prefix of `tokens`, and whether all of them are exact.

        The caller gets a reference to each. Approximate pages are returned only if allowed, and
        only those that `by` inserted.
        """
        found: list[int] = []
        digests: list[bytes] = []
        all_exact = True
        for digest in _digests(tokens, self._cache.page_size, group):
            page, exact, maker = self._pages.get(digest, (-1, False, None))
            if page < 0 or not (exact or (approximate and maker == by)):
                break
            found.append(page)
            digests.append(digest)
            all_exact &= exact
        self._touch(digests)
        self._cache.share(found)
        return found, all_exact

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        num_exact: int,
        *,
        by: object = None,
        group: bytes = b"",
    ) -> None:
        """Inserts the full pages of `tokens`; tokens from `num_exact` on are approximate."""
        size = self._cache.page_size
        digests = list(_digests(tokens, size, group))[: len(pages)]
        for i, (digest, page) in enumerate(zip(digests, pages, strict=False)):
            exact = (i + 1) * size <= num_exact
            known = self._pages.get(digest)
            if known is None or (exact and not known[1]):
                self._cache.share([page])
                self._pages[digest] = (page, exact, None if exact else by)
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
        self._cache.release(page for page, *_ in self._pages.values())
        self._pages.clear()

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Renumbers pages that moved (`PageCache.pack`)."""
        for digest, (page, exact, maker) in self._pages.items():
            self._pages[digest] = (numbers.get(page, page), exact, maker)

    @property
    def num_pages(self) -> int:
        """How many pages the index holds a reference to."""
        return len(self._pages)

    def held(self) -> list[int]:
        """The pages that the index holds a reference to."""
        return [page for page, *_ in self._pages.values()]

    def _touch(self, digests: Sequence[bytes]) -> None:
        # A prefix's first pages serve all longer ones: they are touched last and evicted last.
        for digest in reversed(digests):
            self._pages.move_to_end(digest)


def _digests(tokens: Sequence[int], page_size: int, group: bytes) -> Iterator[bytes]:
    digest = group
    array = np.asarray(tokens, dtype=np.int64)
    for start in range(0, len(array) - page_size + 1, page_size):
        content = array[start : start + page_size].tobytes()
        digest = hashlib.blake2b(digest + content, digest_size=16).digest()
        yield digest

"""The prefix cache: full pages, found by the tokens up to their end.

A page is known by a digest of all tokens from the start of the sequence to the end of the page. The
index holds a reference to each cached page and releases the least recently used ones when pages run
out. Pages written by a sparse decode are *approximate*: they are returned only to requests that
allow it (a continued chat) under the same policy, never to a plain request, whose prompt is always
computed exactly. A *group* of requests has its own prefixes if its pages hold more than keys and
values.

Where a page's data also depend on the tokens after it (InfLLM's received attention), a page is
reused only if the pages that follow it in the prefix were inserted with it: another sequence with
the same tokens up to the page's end may have continued differently.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from keyhole.cache.pages import PageCache

#: Pages whose tokens are converted at once: a long prompt is not copied as a whole.
_PIECE_PAGES = 1024
_DIGEST_BYTES = 16
#: The maker of an exact page.
_EXACT = 0
#: Policies that are remembered as makers, whether they have pages here or not.
_MOST_MAKERS = 64


class PrefixIndex:
    """Maps prefixes to pages."""

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache
        self._entries = _Entries()
        self._insertions = itertools.count()
        # The policies that computed approximate pages; an entry has the number of its maker.
        self._makers: list[tuple[object, int]] = []
        self._maker_numbers = itertools.count(_EXACT + 1)

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
        size, entries, found = self._cache.page_size, self._entries, array("i")
        allowed = {_EXACT}
        if approximate:
            allowed.update(number for maker, number in self._makers if maker == by)
        for digest in prefix_digests(tokens, size, group, end):
            entry = entries.find(digest)
            if not entry or entries.makers[entry] not in allowed:
                break
            found.append(entry)
        self._touch(found)
        count = len(found) if reusable is None else reusable(len(found) * size, size) // size
        after = len(found) - count  # pages on which the data of a page depend
        for i in range(count):
            origins = (entries.insertions[one] for one in found[i + 1 : i + 1 + after])
            if any(insertion != entries.insertions[found[i]] for insertion in origins):
                count = i
                break
        pages = [entries.pages[entry] for entry in found[:count]]
        self._cache.share(pages)
        return pages, all(entries.makers[entry] == _EXACT for entry in found[:count])

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
        size, entries = self._cache.page_size, self._entries
        end = min(len(tokens) if end is None else end, len(pages) * size)
        rough = self._maker(by) if num_exact < end else _EXACT
        insertion, inserted = next(self._insertions), array("i")
        for i, digest in enumerate(prefix_digests(tokens, size, group, end)):
            maker = _EXACT if (i + 1) * size <= num_exact else rough
            entry = entries.find(digest)
            known = entry and entries.pages[entry]
            is_better = maker == _EXACT and entries.makers[entry] != _EXACT
            if not entry or is_better:
                self._cache.share([pages[i]])
                entry = entry or entries.add(digest)
                entries.set(entry, pages[i], maker, insertion)
                if is_better:
                    self._cache.release([known])
            inserted.append(entry)
        self._touch(inserted)

    def evict(self, count: int) -> int:
        """Releases unshared pages, oldest first, until `count` are free; returns how many."""
        freed = 0
        for entry in self._entries.oldest_first():
            if freed >= count:
                break
            page = self._entries.pages[entry]
            if self._cache.references(page) == 1:
                self._entries.remove(entry)
                self._cache.release([page])
                freed += 1
        return freed

    def clear(self) -> None:
        """Removes all entries."""
        self._cache.release(self.held())
        self._entries = _Entries()

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Renumbers pages that moved (`PageCache.pack`)."""
        pages = self._entries.pages
        for entry in self._entries.oldest_first():
            pages[entry] = numbers.get(pages[entry], pages[entry])

    @property
    def num_pages(self) -> int:
        """How many pages the index holds a reference to."""
        return self._entries.count

    def held(self) -> list[int]:
        """The pages that the index holds a reference to."""
        return [self._entries.pages[entry] for entry in self._entries.oldest_first()]

    def _touch(self, entries: Sequence[int]) -> None:
        # A prefix's first pages serve all longer ones: they are touched last and evicted last.
        for entry in reversed(entries):
            self._entries.touch(entry)

    def _maker(self, by: object) -> int:
        """The number of a policy."""
        for maker, number in self._makers:
            if maker == by:
                return number
        if len(self._makers) >= _MOST_MAKERS:
            used = {self._entries.makers[entry] for entry in self._entries.oldest_first()}
            self._makers = [one for one in self._makers if one[1] in used]
        self._makers.append((by, next(self._maker_numbers)))
        return self._makers[-1][1]


class _Entries:
    """A hash table of digests whose entries are in the order of their use.

    In arrays an entry takes at most 55 bytes, where a dictionary of objects takes 300: a page of 16
    tokens of a small model has only a few KiB. Entry 0 is none; it begins and ends the order.
    pages, makers, insertions: of each entry, what `set` was given. count: how many there are.
    """

    def __init__(self) -> None:
        self.count = 0
        self.pages, self.makers, self.insertions = array("i", [0]), array("i", [0]), array("q", [0])
        self._digests = bytearray(_DIGEST_BYTES)
        self._older, self._newer = array("i", [0]), array("i", [0])
        # The next entry of the same bucket; for a removed entry, the one that was removed before.
        self._next = array("i", [0])
        self._removed = 0
        self._buckets = array("i", [0]) * 64
        self._columns = (
            *(self.pages, self.makers, self.insertions),
            *(self._older, self._newer, self._next),
        )

    def find(self, digest: bytes) -> int:
        """The entry with this digest, or 0."""
        entry = self._buckets[hash(digest) & len(self._buckets) - 1]
        while entry and self.digest(entry) != digest:
            entry = self._next[entry]
        return entry

    def add(self, digest: bytes) -> int:
        """A new entry, the newest; `set` follows."""
        self.count += 1
        if self.count > len(self._buckets):
            self._enlarge()
        entry = self._removed
        if entry:
            self._removed = self._next[entry]
        else:
            entry = len(self._next)
            self._digests.extend(bytes(_DIGEST_BYTES))
            for column in self._columns:
                column.append(0)
        self._digests[entry * _DIGEST_BYTES : (entry + 1) * _DIGEST_BYTES] = digest
        self._put(entry)
        self._append(entry)
        return entry

    def set(self, entry: int, page: int, maker: int, insertion: int) -> None:
        """Sets the page of an entry, who made it, and in which call of `insert`."""
        self.pages[entry], self.makers[entry] = page, maker
        self.insertions[entry] = insertion

    def remove(self, entry: int) -> None:
        """Removes an entry."""
        bucket = hash(self.digest(entry)) & len(self._buckets) - 1
        one = self._buckets[bucket]
        if one == entry:
            self._buckets[bucket] = self._next[entry]
        else:
            while self._next[one] != entry:
                one = self._next[one]
            self._next[one] = self._next[entry]
        self._unlink(entry)
        self._next[entry], self._removed = self._removed, entry
        self.count -= 1

    def touch(self, entry: int) -> None:
        """Makes an entry the newest."""
        self._unlink(entry)
        self._append(entry)

    def oldest_first(self) -> Iterator[int]:
        """All entries; the one that was returned last may be removed meanwhile."""
        entry = self._newer[0]
        while entry:
            after = self._newer[entry]
            yield entry
            entry = after

    def digest(self, entry: int) -> bytes:
        """The digest of an entry."""
        return bytes(self._digests[entry * _DIGEST_BYTES : (entry + 1) * _DIGEST_BYTES])

    def _put(self, entry: int) -> None:
        """Puts an entry into its bucket."""
        bucket = hash(self.digest(entry)) & len(self._buckets) - 1
        self._next[entry], self._buckets[bucket] = self._buckets[bucket], entry

    def _enlarge(self) -> None:
        """Doubles the buckets, so that few entries share one."""
        self._buckets = array("i", [0]) * (2 * len(self._buckets))
        for entry in self.oldest_first():
            self._put(entry)

    def _append(self, entry: int) -> None:
        last = self._older[0]
        self._older[entry], self._newer[entry] = last, 0
        self._newer[last] = self._older[0] = entry

    def _unlink(self, entry: int) -> None:
        before, after = self._older[entry], self._newer[entry]
        self._newer[before], self._older[after] = after, before


def prefix_digests(
    tokens: Sequence[int], page_size: int, group: bytes = b"", end: int | None = None
) -> Iterator[bytes]:
    """For each full page of `tokens[:end]` a digest of the tokens up to its end, and the group."""
    digest = group
    end = (len(tokens) if end is None else end) // page_size * page_size
    for first in range(0, end, _PIECE_PAGES * page_size):
        piece = tokens[first : min(end, first + _PIECE_PAGES * page_size)]
        for row in np.asarray(piece, dtype=np.int64).reshape(-1, page_size):
            digest = hashlib.blake2b(digest + row.tobytes(), digest_size=_DIGEST_BYTES).digest()
            yield digest

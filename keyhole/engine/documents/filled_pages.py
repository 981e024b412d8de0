"""Questions over the same documents share their pages, as long as one of them runs.

A question takes all pages of another one (`fill_key`), or those whose content is the same
(`page_keys.py`).

What fills the pages before a question depends on its tokens there, on where documents are among
them, on the LoRA adapter, on the reuse method, and on what this one keeps and computes again. If
all of these are equal, so are the pages, and the next question shares them instead of filling its
own. Only the page in which the question begins is copied. Methods that choose without the question
(`reuse`, `epic`) always share; SamKV shares where it makes the same choice.

No reference is held here: pages are no longer found once their last holder has released them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from keyhole.cache.page_list import NO_PAGE, PageList
from keyhole.cache.pages import PageCache
from keyhole.cache.unpaged_keys import UnpagedTokens
from keyhole.engine.documents.filling import Context
from keyhole.engine.documents.page_keys import PageKey
from keyhole.reuse.base import RecomputePlan


def fill_key(context: Context, tokens: np.ndarray, plan: RecomputePlan) -> bytes:
    """A digest of everything that determines the pages; tokens: int64, of the whole prompt."""
    lengths = [document.length for document in context.documents]
    method = f"{type(context.reuse).__qualname__} {context.reuse!r}"
    places = (context.num_prefix, context.offsets, lengths, context.adapter)
    digest = hashlib.blake2b(f"{method} {places}".encode(), digest_size=16)
    digest.update(tokens[: context.end].tobytes())
    for mask in (plan.kept, plan.recomputed):
        digest.update(np.packbits(mask.numpy()).tobytes())
    return digest.digest()


class FilledPages:
    """The pages of filled prompts of one engine and policy, by `fill_key`."""

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache
        self._known: dict[bytes, _Filled] = {}
        self._pages: dict[bytes, tuple[int, int]] = {}  # page and stamp, by its key

    def remember(
        self, key: bytes, entries: list[int], unpaged: UnpagedTokens | None = None
    ) -> None:
        """The entries of a page list up to the question, gaps included; they are held now.

        unpaged: the retrieval head's keys of tokens without a page.
        """
        self._known = {other: one for other, one in self._known.items() if self._is_held(one)}
        stamp = self._cache.stamp
        self._pages = {k: found for k, found in self._pages.items() if stamp(found[0]) == found[1]}
        stamps = [-1 if page == NO_PAGE else stamp(page) for page in entries]
        self._known[key] = _Filled(entries, stamps, unpaged)

    def find(self, key: bytes) -> tuple[list[int], UnpagedTokens | None] | None:
        """What was remembered, if every page is still held and has not been allocated again."""
        found = self._known.get(key)
        if found is None or not self._is_held(found):
            return None
        return found.entries, found.unpaged

    def take_stored(self, keys: list[PageKey], pages: PageList) -> list[PageKey]:
        """Takes the pages of stored tokens that are held; returns their keys."""
        return [key for key in keys if key.is_stored and self._take(key, pages)]

    def share(self, keys: list[PageKey], pages: PageList) -> None:
        """Takes the pages that are held, and remembers the others, which are filled now."""
        for key in keys:
            if not self._take(key, pages):
                page = pages.page(key.entry)
                self._pages[key.digest] = page, self._cache.stamp(page)

    def _take(self, key: PageKey, pages: PageList) -> bool:
        """Takes the page of this key, if one is held."""
        page, stamp = self._pages.get(key.digest, (NO_PAGE, NO_PAGE))
        if page == NO_PAGE or self._cache.stamp(page) != stamp:
            return False
        pages.take(key.entry, page)
        return True

    def _is_held(self, one: _Filled) -> bool:
        if one.unpaged is not None and not one.unpaged.is_held:
            return False
        pairs = zip(one.entries, one.stamps, strict=True)
        return all(page == NO_PAGE or self._cache.stamp(page) == stamp for page, stamp in pairs)


@dataclass(frozen=True, eq=False)
class _Filled:
    """Pages before a question. stamps: of these pages, when they were filled."""

    entries: list[int]
    stamps: list[int]
    unpaged: UnpagedTokens | None

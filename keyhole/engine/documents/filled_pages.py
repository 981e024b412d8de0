"""Questions over the same documents share their pages, as long as one of them runs.

What fills the pages before a question depends on its tokens there, on where documents are among
them, on the LoRA adapter, on the reuse method, and on what this one keeps and computes again. If
all of these are equal, so are the pages, and the next question takes a reference to each instead of
filling its own. Only the page in which the question begins is copied. Methods that choose without
the question (`reuse`, `epic`) always share; SamKV shares where it makes the same choice.

No reference is held here: pages of which the last holder is gone are simply not found.
"""

from __future__ import annotations

import hashlib

import numpy as np

from keyhole.cache.page_list import NO_PAGE
from keyhole.cache.pages import PageCache
from keyhole.engine.documents.filling import Context
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
        self._known: dict[bytes, list[tuple[int, int]]] = {}

    def remember(self, key: bytes, entries: list[int]) -> None:
        """The entries of a page list up to the question, gaps included; they are held now."""
        self._known = {other: pages for other, pages in self._known.items() if self._held(pages)}
        stamps = (-1 if page == NO_PAGE else self._cache.stamp(page) for page in entries)
        self._known[key] = list(zip(entries, stamps, strict=True))

    def find(self, key: bytes) -> list[int] | None:
        """The entries, if every page is still held and has not been allocated again."""
        found = self._known.get(key)
        if found is None or not self._held(found):
            return None
        return [page for page, _ in found]

    def _held(self, pages: list[tuple[int, int]]) -> bool:
        return all(page == NO_PAGE or self._cache.stamp(page) == stamp for page, stamp in pages)

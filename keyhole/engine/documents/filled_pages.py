"""Questions over the same documents share their pages, as long as one of them runs.

A question takes all pages of another one (`fill_key`), or those whose content is the same
(`page_keys`).

What fills the pages before a question depends on its tokens there, on where documents are among
them, on the LoRA adapter, on the reuse method, and on what this one keeps and computes again. If
all of these are equal, so are the pages, and the next question shares them instead of filling its
own. Only the page in which the question begins is copied. Methods that choose without the question
(`reuse`, `epic`) always share; SamKV shares where it makes the same choice.

A page of stored keys and values is the same for every question that has these tokens of these
documents at these positions, whatever else it keeps or computes again. A token that was computed
for a prompt also depends on all tokens before it, and on what layers keep and compute again there.

No reference is held here: pages are no longer found once their last holder has released them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from keyhole.cache.packing import Packing
from keyhole.cache.page_list import NO_PAGE, PageList
from keyhole.cache.pages import PageCache
from keyhole.cache.unpaged_keys import UnpagedTokens
from keyhole.engine.documents.filling import Context
from keyhole.reuse.base import RecomputePlan


@dataclass(frozen=True, eq=False)
class PageKey:
    """The key of a full page.

    entry: its place in the page list. positions: int32 [L, page_size], the tokens in each layer, -1
    where there is none. is_stored: whether no token in it was computed for this prompt.
    """

    entry: int
    digest: bytes
    positions: np.ndarray
    is_stored: bool


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
        self._known: dict[bytes, FilledEntries] = {}
        self._pages: dict[bytes, tuple[int, int]] = {}  # page and stamp, by its key

    def remember(
        self, key: bytes, entries: list[int], unpaged: UnpagedTokens | None = None
    ) -> None:
        """The entries of a page list up to the question, gaps included; they are held now.

        No token of the question is in them yet. unpaged: the retrieval head's keys of tokens
        without a page.
        """
        self._known = {other: one for other, one in self._known.items() if self._is_held(one)}
        stamp = self._cache.stamp
        self._pages = {k: found for k, found in self._pages.items() if stamp(found[0]) == found[1]}
        stamps = [-1 if page == NO_PAGE else stamp(page) for page in entries]
        features = self._cache.common.get("head_features")
        last = None
        if features is not None and entries and entries[-1] != NO_PAGE:
            last = features[entries[-1]].clone()
        self._known[key] = FilledEntries(entries, stamps, unpaged, last)

    def find(self, key: bytes) -> FilledEntries | None:
        """What was remembered, if every page is still held and has not been allocated again."""
        found = self._known.get(key)
        return found if found is not None and self._is_held(found) else None

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

    def _is_held(self, one: FilledEntries) -> bool:
        if one.unpaged is not None and not one.unpaged.is_held:
            return False
        pairs = zip(one.entries, one.stamps, strict=True)
        return all(page == NO_PAGE or self._cache.stamp(page) == stamp for page, stamp in pairs)


@dataclass(frozen=True, eq=False)
class FilledEntries:
    """Pages before a question. stamps: of these pages, when they were filled.

    last: the features that a retrieval head needs of the last token before the question. In the
    last page, those of the question's own tokens replace them.
    """

    entries: list[int]
    stamps: list[int]
    unpaged: UnpagedTokens | None
    last: Tensor | None


def page_keys(
    context: Context,
    tokens: np.ndarray,
    plan: RecomputePlan,
    packing: Packing | None,
    page_size: int,
) -> Iterator[PageKey]:
    """The keys of all full pages before the question that any layer uses.

    tokens: int64, of the whole prompt. packing: where layers have their tokens; None: at their
    positions, all of them.
    """
    end, layers = context.end, len(plan.kept)
    if packing is None:
        positions = np.broadcast_to(np.arange(end, dtype=np.int32), (layers, end))
    else:
        positions = packing.positions.numpy().astype(np.int32)
    count = end // page_size
    positions = positions[:, : count * page_size]
    pages = np.ascontiguousarray(positions.reshape(layers, count, page_size).swapaxes(0, 1))
    computed = np.take_along_axis(_computed(context, plan), np.maximum(positions, 0), 1)
    computed = (computed & (positions >= 0)).max(0).reshape(count, page_size).max(1)
    sources = _Sources(context, tokens, plan)
    last = pages.max((1, 2))
    for entry in np.argsort(last, kind="stable").tolist():
        page, is_stored = pages[entry], not computed[entry]
        if last[entry] < 0:
            continue
        digest = hashlib.blake2b(page.data, digest_size=16)
        digest.update(sources.stored(page[page >= 0]) if is_stored else sources.up_to(last[entry]))
        yield PageKey(entry, digest.digest(), page, is_stored)


def _computed(context: Context, plan: RecomputePlan) -> np.ndarray:
    """Bool [L, end]: tokens that were computed for this prompt, in each layer."""
    computed = np.ones((len(plan.kept), context.end), bool)
    if context.reuse.probe_layer is None:  # else it has computed more than the plan says
        computed[:, context.positions] = plan.recomputed.numpy()
    return computed


class _Sources:
    """Digests of everything that tokens were computed from."""

    def __init__(self, context: Context, tokens: np.ndarray, plan: RecomputePlan) -> None:
        method = f"{type(context.reuse).__qualname__} {context.reuse!r}"
        self._begin = f"{context.adapter} {context.reuse.shifts_rope}".encode()
        self._state = hashlib.blake2b(f"{method} {context.num_prefix}".encode(), digest_size=16)
        self._state.update(self._begin)
        self._tokens = tokens
        self._documents = []
        for document, offset in zip(context.documents, context.offsets, strict=True):
            source = hashlib.blake2b(f"{offset} {document.length}".encode(), digest_size=16)
            source.update(tokens[offset : offset + document.length].tobytes())
            self._documents.append(source.digest())
        self._offsets = np.asarray(context.offsets, np.int64)
        masks = np.ones((2 * len(plan.kept), context.end), bool)
        masks[:, context.positions] = np.concatenate([plan.kept.numpy(), plan.recomputed.numpy()])
        # By token, so that each part is contiguous.
        self._masks, self._done = np.ascontiguousarray(np.packbits(masks, axis=0).T), 0

    def stored(self, positions: np.ndarray) -> bytes:
        """Of the documents that these tokens belong to."""
        own = np.unique(np.searchsorted(self._offsets, positions, side="right") - 1)
        return self._begin + b"".join(self._documents[i] for i in own.tolist())

    def up_to(self, last: int) -> bytes:
        """Of everything up to this position; calls ascend."""
        part = slice(self._done, last + 1)
        begun = slice(*np.searchsorted(self._offsets, (part.start, max(part.start, part.stop))))
        self._state.update(b"".join(self._documents[begun]))
        self._state.update(f"{part}".encode())
        self._state.update(self._tokens[part].tobytes())
        self._state.update(self._masks[part].tobytes())
        self._done = max(self._done, last + 1)
        return self._state.digest()

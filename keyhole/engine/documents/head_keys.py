"""The retrieval head's keys of stored documents: made with a document, and placed in a prompt.

A head without features needs token ids alone. One with features makes a token's key from the
features of the token before it, and those of a stored document were there only while it was
encoded. So its keys are stored beside the layers', not rotated, with the features of the last token
for the key of what follows. In a prompt they are rotated to their true positions, but for tokens
after one that this prompt computed (the prefix, a separator, what is computed again): these get
keys of its features.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.page_list import PageList
from keyhole.cache.pages import PageCache
from keyhole.documents.record import HeadRecord
from keyhole.engine.documents.filling import Context
from keyhole.engine.head_runner import HeadRunner
from keyhole.models.batch import Batch
from keyhole.retrieval.head import RetrievalHead

# Tokens whose keys are made at once.
_PIECE = 1024


class HeadEncoding:
    """Takes a document chunk by chunk, as it is encoded."""

    def __init__(self, lookahead: HeadRunner) -> None:
        self._lookahead = lookahead
        self._keys: list[Tensor] = []
        self._last: Tensor | None = None

    @torch.no_grad()
    def add(self, token_ids: Tensor, batch: Batch) -> None:
        """The next chunk's tokens, int64 [T], after their forward."""
        fused = self._lookahead.fuse(batch)
        assert fused is not None, "only a head with features has something to store"
        last = torch.zeros_like(fused[0]) if self._last is None else self._last
        before = torch.cat([last[None], fused[:-1]])
        self._keys.append(self._lookahead.head.project(token_ids, before)[1].cpu())
        self._last = fused[-1]

    def record(self) -> HeadRecord:
        """What is stored of it, on the CPU."""
        assert self._last is not None, "a document has at least one token"
        return HeadRecord(torch.cat(self._keys), self._last.cpu())


class PlacedHead:
    """One prompt on its way into the pages, as the head sees it; for callers without gradients."""

    def __init__(
        self,
        lookahead: HeadRunner,
        cache: PageCache,
        context: Context,
        token_ids: np.ndarray,
        device: torch.device,
    ) -> None:
        self._lookahead = lookahead
        self._cache = cache
        self._context = context
        self._token_ids = token_ids
        self._device = device
        # Tokens of known features, and these.
        self._known: list[np.ndarray] = []
        self._fused: list[Tensor] = []

    def take(self, positions: np.ndarray, batch: Batch) -> None:
        """The tokens at these positions, int64, were computed in this prompt."""
        fused = self._lookahead.fuse(batch)
        if fused is not None:
            self._known.append(positions)
            self._fused.append(fused)

    def write(self, positions: np.ndarray, pages: PageList) -> Iterator[None]:
        """Writes keys of the tokens at these positions, ascending: all before the question.

        A piece at each step of the iteration.
        """
        name = self._lookahead.stored_as
        if name is None:
            yield from self._make(positions, None, pages)
            return
        self._take_ends(name)
        order = np.argsort(np.concatenate(self._known))
        known = np.concatenate(self._known)[order]
        fused = torch.cat(self._fused)[torch.from_numpy(order).to(self._device)]
        # Nothing stands before token 0: zeros.
        known, fused = np.append(-1, known), torch.cat([torch.zeros_like(fused[:1]), fused])
        fresh = np.isin(positions - 1, known)
        for places, keys in self._stored(name, positions[~fresh]):
            self._put(keys, places, pages)
            yield
        before = torch.from_numpy(np.searchsorted(known, positions[fresh] - 1)).to(self._device)
        yield from self._make(positions[fresh], fused[before], pages)
        features, end = self._cache.common["head_features"], self._context.end
        page = pages.slots(np.array([end - 1]))[0] // self._cache.page_size
        features[page] = fused[int(np.searchsorted(known, end - 1))].to(features.dtype)

    def _take_ends(self, name: str) -> None:
        """Features of the last token of each document, as stored, where nothing is fresher."""
        for document, offset in zip(self._context.documents, self._context.offsets, strict=True):
            last = np.array([offset + document.length - 1])
            if not any(np.isin(last, known).any() for known in self._known):
                self._known.append(last)
                self._fused.append(document.head_last(name).to(self._device)[None])

    def _stored(self, name: str, positions: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Stored keys of what is wanted, and their places, one piece per run of tokens."""
        for document, offset in zip(self._context.documents, self._context.offsets, strict=True):
            inside = (positions >= offset) & (positions < offset + document.length)
            own = positions[inside] - offset
            for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1):
                if len(run):
                    keys = document.head_keys(name, int(run[0]), int(run[-1]) + 1)
                    for start in range(0, len(run), _PIECE):
                        part = slice(start, start + _PIECE)
                        yield run[part] + offset, keys[part].to(self._device)

    def _make(self, positions: np.ndarray, fused: Tensor | None, pages: PageList) -> Iterator[None]:
        for start in range(0, len(positions), _PIECE):
            part = slice(start, start + _PIECE)
            ids = torch.from_numpy(self._token_ids[positions[part]]).to(self._device)
            before = None if fused is None else fused[part]
            keys = self._lookahead.head.project(ids, before)[1]
            self._put(keys, positions[part], pages)
            yield

    def _put(self, keys: Tensor, positions: np.ndarray, pages: PageList) -> None:
        head: RetrievalHead = self._lookahead.head
        keys = head.turned(keys, torch.from_numpy(positions).to(self._device))
        slots = torch.from_numpy(pages.slots(positions)).to(self._device)
        self._lookahead.put(keys, slots)

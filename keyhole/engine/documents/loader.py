"""Loads kept tokens of stored documents into pages, with RoPE shifted to their new positions.

Also collects the retrieval head's keys while a document is encoded, and places them in a prompt.

A head without features needs only token ids. A head with features computes a token's key from the
features of the token before it, and the features of a stored document exist only while it is
encoded. Its keys are therefore stored next to those of the layers, not rotated, together with the
features of the last token, from which the key of the next token is computed. In a prompt they are
rotated to their true positions. Where this prompt computed the token before (in the prefix, a
separator, or a recomputed token), the key is computed from its features instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from keyhole import kernels
from keyhole.cache.packing import Packing
from keyhole.cache.page_list import PageList
from keyhole.cache.pages import PageCache
from keyhole.cache.unpaged_keys import UnpagedTokens
from keyhole.documents.record import HeadRecord
from keyhole.documents.store import StoredDocument
from keyhole.engine.documents.filling import Context, Pace
from keyhole.engine.documents.stored_rows import HotBlocks, PinnedRing, ReadAhead, Rows
from keyhole.engine.head_runner import HeadRunner
from keyhole.models.batch import Batch
from keyhole.models.positions import RopeShift
from keyhole.retrieval.head import RetrievalHead
from keyhole.reuse.base import PlacedDocument, Shift

_T = TypeVar("_T")

# Tokens of a layer that one unit of work copies into the pages, or whose head keys it computes.
_PIECE = 1024
# The same while no other request waits for the unit: fewer launches.
_PIECE_ALONE = 4096
# Pieces that are read while one is copied.
_AHEAD = 2


class Loader:
    """The documents of one prompt.

    rings: of each layer, what copies rows to its device. hot_blocks: rows that are there already.
    pace: of the units.
    present: bool [L, T], whose keys and values are in the pages already.
    """

    def __init__(
        self,
        context: Context,
        cache: PageCache,
        rope_shift: RopeShift,
        rings: Sequence[PinnedRing],
        hot_blocks: HotBlocks,
        pace: Pace,
    ) -> None:
        self._context = context
        self._cache = cache
        self._rope_shift = rope_shift
        self._rings = rings
        self._hot_blocks = hot_blocks
        self._pace = pace
        self._positions = context.positions
        lengths = [document.length for document in context.documents]
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # The RoPE shift of each token: from its position in the document to the one in the prompt.
        self._by = np.repeat(np.asarray(context.offsets, np.int64), lengths)
        self.num_layers = len(cache.keys)
        self.present = torch.zeros(self.num_layers, int(self._starts[-1]), dtype=torch.bool)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the store for this prompt."""
        # The documents were opened for this prompt alone. A document may occur twice in it.
        return sum(document.bytes_read for document in set(self._context.documents))

    def placed(self) -> list[PlacedDocument]:
        """The documents as a reuse method sees them, on the CPU."""
        shift = self._rope_shift.on(torch.device("cpu")).shift
        moves = self._context.reuse.shifts_rope
        return placed(self._context.documents, self._context.offsets, shift if moves else None)

    def load(
        self, wanted: Tensor, pages: PageList, packing: Packing | None = None
    ) -> Iterator[None]:
        """Loads tokens, bool [L, T], into their pages, except those that are present.

        packing: where each layer has them; None: at their positions. A piece of a layer at each
        step of the iteration; the next ones are read meanwhile.
        """
        missing = wanted & ~self.present
        ahead: deque[tuple[int, ReadAhead]] = deque()
        try:
            for layer, tokens in self._pieces(missing.numpy()):
                places = self._positions[tokens]
                if packing is not None:
                    places = packing.places[layer].numpy()[places]
                numbers = [pages.slots(places)]
                if self._context.reuse.shifts_rope:
                    numbers.append(self._by[tokens])
                if self._hot_blocks.limit_bytes:
                    self._put(layer, self._hot_rows(layer, tokens), self._sent(layer, numbers))
                    yield
                    continue
                documents, ring = self._context.documents, self._rings[layer]
                read = ReadAhead(ring, documents, self._starts, layer, tokens, numbers)
                ahead.append((layer, read))
                if len(ahead) > _AHEAD:
                    first, read = ahead.popleft()
                    self._put(first, *read.rows())
                    yield
            while ahead:
                first, read = ahead.popleft()
                self._put(first, *read.rows())
                yield
        finally:  # an error, or the request was aborted
            for _, read in ahead:
                read.cancel()
        self.present |= missing

    def mark(self, positions: np.ndarray) -> None:
        """Marks tokens as present: positions int32 [L, n] in each layer, -1 for none."""
        for layer, row in enumerate(positions):
            tokens = np.searchsorted(self._positions, row[row >= 0])
            self.present[layer, torch.from_numpy(tokens)] = True

    def _pieces(self, wanted: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The tokens of each unit, ascending, with their layer; wanted: bool [L, T]."""
        far = not all(document.is_local for document in self._context.documents)
        for layer, row in enumerate(wanted):
            tokens, done = np.flatnonzero(row), 0
            while done < len(tokens):
                # From far away, fewer and larger reads are faster.
                size = len(tokens) if far else _PIECE_ALONE if self._pace.is_alone else _PIECE
                yield layer, tokens[done : done + size]
                done += size

    def _put(self, layer: int, rows: Rows, numbers: Sequence[Tensor]) -> None:
        """Writes rows into pages; numbers: their slots, and by what they are rotated, if at all."""
        key, value = rows
        if len(numbers) > 1:
            # Keys of 8 bits are quantised again: a rotated row has another largest number.
            key = self._rope_shift.shift(layer, kernels.dequantised(key), numbers[1][:, None])
        values = None if value is None else self._cache.values[layer]
        kernels.append(self._cache.keys[layer], values, key, value, numbers[0])

    def _sent(self, layer: int, numbers: Sequence[np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(x).to(self._rings[layer].device) for x in numbers]

    def _hot_rows(self, layer: int, tokens: np.ndarray) -> Rows:
        """Rows of some tokens, ascending, on the device; their blocks are kept there."""
        edges = np.searchsorted(tokens, self._starts)
        found = []
        for i, document in enumerate(self._context.documents):
            own = tokens[edges[i] : edges[i + 1]] - self._starts[i]
            if len(own):
                found.append(self._own_hot_rows(document, layer, own))
        values = [value for _, value in found if value is not None]
        return torch.cat([key for key, _ in found]), torch.cat(values) if values else None

    def _own_hot_rows(self, document: StoredDocument, layer: int, wanted: np.ndarray) -> Rows:
        """The rows of one document; blocks of one without an identity are not kept."""
        size, identity = document.block_size, document.identity
        numbers = np.unique(wanted // size)
        found: dict[int, Rows | None] = dict.fromkeys(numbers.tolist())
        if identity is not None:
            found = {n: self._hot_blocks.get((identity, layer, n)) for n in found}
        missing = np.array([n for n in found if found[n] is None], np.int64)
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            for n, rows in zip(run.tolist(), self._blocks(document, layer, run), strict=True):
                found[n] = rows
                if identity is not None:
                    self._hot_blocks.put((identity, layer, n), rows)
        blocks = [rows for rows in found.values() if rows is not None]
        # All blocks but the document's last one are whole.
        place = np.searchsorted(numbers, wanted // size) * size + wanted % size
        (places,) = self._sent(layer, [place])
        key = torch.cat([keys for keys, _ in blocks])[places]
        values = [value for _, value in blocks if value is not None]
        return key, torch.cat(values)[places] if values else None

    def _blocks(self, document: StoredDocument, layer: int, run: np.ndarray) -> Iterator[Rows]:
        """Blocks that follow each other, each in memory of its own on the device."""
        if not len(run):
            return
        size = document.block_size
        tokens = np.arange(run[0] * size, min((run[-1] + 1) * size, document.length))
        starts = np.array([0, document.length])
        read = ReadAhead(self._rings[layer], [document], starts, layer, tokens, [])
        (key, value), _ = read.rows()
        for start in range(0, len(tokens), size):
            own = slice(start, start + size)
            yield key[own].clone(), None if value is None else value[own].clone()


class HeadEncoding:
    """Collects the head's keys of a document, chunk by chunk, while it is encoded."""

    def __init__(self, head_runner: HeadRunner) -> None:
        self._head_runner = head_runner
        self._keys: list[Tensor] = []
        self._last: Tensor | None = None

    @torch.no_grad()
    def add(self, token_ids: Tensor, batch: Batch) -> None:
        """Adds the next chunk's tokens, int64 [T], after their forward pass."""
        fused = self._head_runner.fuse(batch)
        assert fused is not None, "only a head with features has something to store"
        last = torch.zeros_like(fused[0]) if self._last is None else self._last
        before = torch.cat([last[None], fused[:-1]])
        self._keys.append(self._head_runner.head.project(token_ids, before)[1].cpu())
        self._last = fused[-1]

    def record(self) -> HeadRecord:
        """The tensors to store, on the CPU."""
        assert self._last is not None, "a document has at least one token"
        return HeadRecord(torch.cat(self._keys), self._last.cpu())


class PlacedHead:
    """Writes the head's keys of one prompt; for callers under `torch.no_grad`."""

    def __init__(
        self,
        head_runner: HeadRunner,
        cache: PageCache,
        context: Context,
        token_ids: np.ndarray,
        device: torch.device,
    ) -> None:
        self._head_runner = head_runner
        self._cache = cache
        self._context = context
        self._token_ids = token_ids
        self._device = device
        # Positions of tokens whose features are known, and the features.
        self._known: list[np.ndarray] = []
        self._fused: list[Tensor] = []
        self._to: tuple[PageList, UnpagedTokens]

    def take(self, positions: np.ndarray, batch: Batch) -> None:
        """Takes features of tokens, int64 positions, that were computed in this prompt."""
        fused = self._head_runner.fuse(batch)
        if fused is not None:
            self._known.append(positions)
            self._fused.append(fused)

    def hold(self, positions: np.ndarray, pages: PageList) -> UnpagedTokens | None:
        """Room for the keys of those tokens that have no page; None without memory."""
        missing = positions[~pages.has(positions)]
        return self._head_runner.unpaged.hold(missing, self._context.end)

    def write(
        self, positions: np.ndarray, pages: PageList, unpaged: UnpagedTokens
    ) -> Iterator[None]:
        """Writes keys of the tokens at these positions, ascending: all before the question.

        unpaged: where those without a page are. A piece at each step of the iteration.
        """
        self._to = pages, unpaged
        name = self._head_runner.stored_as
        if name is None:
            yield from self._make(positions, None)
            return
        self._take_ends(name)
        order = np.argsort(np.concatenate(self._known))
        known = np.concatenate(self._known)[order]
        fused = torch.cat(self._fused)[torch.from_numpy(order).to(self._device)]
        # Token 0 has no preceding token: zeros.
        known, fused = np.append(-1, known), torch.cat([torch.zeros_like(fused[:1]), fused])
        fresh = np.isin(positions - 1, known)
        for places, keys in self._stored(name, positions[~fresh]):
            self._put(keys, places)
            yield
        before = torch.from_numpy(np.searchsorted(known, positions[fresh] - 1)).to(self._device)
        yield from self._make(positions[fresh], fused[before])
        features, end = self._cache.common["head_features"], self._context.end
        page = pages.slots(np.array([end - 1]))[0] // self._cache.page_size
        features[page] = fused[int(np.searchsorted(known, end - 1))].to(features.dtype)

    def _take_ends(self, name: str) -> None:
        """Adds the stored features of each document's last token, unless the prompt computed it."""
        for document, offset in zip(self._context.documents, self._context.offsets, strict=True):
            last = np.array([offset + document.length - 1])
            if not any(np.isin(last, known).any() for known in self._known):
                self._known.append(last)
                self._fused.append(document.head_last(name).to(self._device)[None])

    def _stored(self, name: str, positions: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor]]:
        """The stored keys of the wanted tokens and their positions, one piece per run of tokens."""
        for document, offset in zip(self._context.documents, self._context.offsets, strict=True):
            inside = (positions >= offset) & (positions < offset + document.length)
            own = positions[inside] - offset
            for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1):
                if len(run):
                    keys = document.head_keys(name, int(run[0]), int(run[-1]) + 1)
                    for start in range(0, len(run), _PIECE):
                        part = slice(start, start + _PIECE)
                        yield run[part] + offset, keys[part].to(self._device)

    def _make(self, positions: np.ndarray, fused: Tensor | None) -> Iterator[None]:
        for start in range(0, len(positions), _PIECE):
            part = slice(start, start + _PIECE)
            ids = torch.from_numpy(self._token_ids[positions[part]]).to(self._device)
            before = None if fused is None else fused[part]
            keys = self._head_runner.head.project(ids, before)[1]
            self._put(keys, positions[part])
            yield

    def _put(self, keys: Tensor, positions: np.ndarray) -> None:
        pages, unpaged = self._to
        head: RetrievalHead = self._head_runner.head
        keys = head.rotated(keys, torch.from_numpy(positions).to(self._device))
        slots = unpaged.table.numpy()[positions]
        paged = slots < 0
        if paged.any():
            there = torch.from_numpy(paged).to(self._device)
            own = torch.from_numpy(pages.slots(positions[paged])).to(self._device)
            self._head_runner.put(keys[there], own)
        if not paged.all():
            there = torch.from_numpy(~paged).to(self._device)
            own = torch.from_numpy(slots[~paged]).long().to(self._device)
            self._head_runner.put_unpaged(keys[there], own)


def placed(
    documents: Sequence[StoredDocument], offsets: Sequence[int], shift: Shift | None
) -> list[PlacedDocument]:
    """The documents of one prompt; their statistics are in memory, extreme keys are read on access.

    offsets: position of each document's first token. shift: None if keys stay as they were stored.
    """
    return [
        PlacedDocument(
            name=document.info.name,
            length=document.length,
            offset=offset,
            block_size=document.block_size,
            layers=_ByLayer(document.statistics, document.num_layers),
            extremes=_ByLayer(_extremes(document), document.num_layers),
            shift=shift,
        )
        for document, offset in zip(documents, offsets, strict=True)
    ]


def _extremes(document: StoredDocument) -> Callable[[int], Tensor]:
    """The extreme keys of a layer; those of all layers are read at the first call."""
    read = cache(document.extreme_keys)
    return lambda layer: read()[layer]


class _ByLayer(Sequence[_T]):
    """The data of a document by layer, read on access."""

    def __init__(self, read: Callable[[int], _T], num_layers: int) -> None:
        self._read = read
        self._num_layers = num_layers

    def __len__(self) -> int:
        return self._num_layers

    def __getitem__(self, layer: int) -> _T:  # type: ignore[override]
        if not -self._num_layers <= layer < self._num_layers:
            raise IndexError(layer)
        return self._read(layer % self._num_layers)

"""Sequences that lack some of their tokens: what each layer keeps, and what eviction retains.

Each layer may drop different tokens of a prompt with stored documents; a table records those that
it kept.

A dropped token is a slot in a page that the layer does not read, and pages that no layer reads are
not allocated, so the rest of the engine is unaffected. Where the policy allows it, a layer's kept
tokens are packed, and "token" here means its place (`cache/packing.py`). Layers have different
tokens at the same place. A selection that one layer makes for others is therefore translated to
positions, and each layer reads the tokens at these positions from its own places. Every layer has
all tokens after the documents, at their positions.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.packing import Packing
from keyhole.kernels import Selection


@dataclass(frozen=True)
class RetainedPages:
    """Pages that full-attention layers still read, as a compact list.

    Keys are rotated to their true positions, so attention needs only the order and number of the
    pages. W: the most entries of any sequence.

    page_table: int32 [B, W], physical pages; the rest of a row is 0. pages: int32 [B], entries.
    lengths: int32 [B], tokens in them, the newest included. pinned: int64 [B], how many of the
    first entries belong to the prompt and are never evicted. goes: bool [B], `due` on the device.
    entries: int64 [B, W], on the host: which page of the sequence each one is; the rest is -1.
    most_generated: the most entries of any sequence that are not pinned.
    due: bool [B], on the host: sequences that evict a page before their next token.
    kept_tokens: as in `Step`, with these lengths.
    """

    page_table: Tensor
    pages: Tensor
    lengths: Tensor
    pinned: Tensor
    goes: Tensor
    entries: np.ndarray
    most_generated: int
    due: np.ndarray
    kept_tokens: KeptTokenRows | None = None


class KeptTokenTable:
    """The kept tokens of every layer, a row per slot of the engine.

    A slot without an entry has all tokens. The last row of layers is the union over all layers, at
    positions.
    shares: whether layers read a selection that is made once for several.
    """

    def __init__(
        self, num_layers: int, num_slots: int, device: torch.device, *, shares: bool
    ) -> None:
        rows = num_layers + 1
        self._shares = shares
        # Of tokens of documents: where a position is, and the other way round. Only if it shares.
        self._places = torch.zeros(num_layers, num_slots, 0, dtype=torch.int32, device=device)
        self._positions = torch.zeros_like(self._places)
        self._kept = torch.zeros(rows, num_slots, 0, dtype=torch.bool, device=device)
        self._tokens = torch.zeros(rows, num_slots, 0, dtype=torch.int32, device=device)
        self._counts = torch.zeros(rows, num_slots, dtype=torch.int32, device=device)
        self._ends = torch.zeros(num_slots, dtype=torch.int32, device=device)
        # Slots of the retrieval head's keys of tokens without a page; -1: with one.
        self._unpaged = torch.full((num_slots, 0), -1, dtype=torch.int32, device=device)
        self._dropped = [0] * num_slots  # the fewest tokens that any layer dropped
        self._lost = [0] * num_slots  # tokens that all layers dropped

    def set(
        self,
        slot: int,
        kept: Tensor,
        packing: Packing | None = None,
        unpaged: Tensor | None = None,
    ) -> None:
        """Slot `slot` has the first tokens in kept, bool [L, C], and all tokens after them.

        packing: where they are; None: at their positions. unpaged: `UnpagedTokens.table`.
        """
        length = kept.shape[1]
        if unpaged is not None:
            self._unpaged = _widened(self._unpaged, length, -1)
            self._unpaged[slot] = -1  # a longer prompt may have stood there
            self._unpaged[slot, :length] = unpaged.to(self._unpaged.device)
        if self._shares:
            own = torch.arange(length, dtype=torch.int32).where(kept, -1)
            places = own if packing is None else packing.places
            positions = own if packing is None else packing.positions.int()
            self._places = _widened(self._places, length)
            self._places[:, slot, :length] = places.to(self._places.device)
            self._positions = _widened(self._positions, length)
            self._positions[:, slot, :length] = positions.to(self._positions.device)
        self._kept = _widened(self._kept, length)
        self._tokens = _widened(self._tokens, length)
        anywhere = (kept if packing is None else packing.places >= 0).any(0, keepdim=True)
        kept = torch.cat([kept, anywhere]).to(self._kept.device)
        self._kept[:, slot, :length] = kept
        # Kept tokens first, in order; what follows them is never read.
        order = kept.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        self._tokens[:, slot, :length] = order.int()
        counts = kept.sum(1, dtype=torch.int32)
        self._counts[:, slot] = counts
        self._ends[slot] = length
        self._dropped[slot] = length - int(counts[:-1].max())
        self._lost[slot] = length - int(counts[-1])

    def clear(self, slot: int) -> None:
        """Slot `slot` has all tokens."""
        self._counts[:, slot] = 0
        self._ends[slot] = 0
        self._unpaged[slot] = -1
        self._dropped[slot] = self._lost[slot] = 0

    def rows(self, slots: Sequence[int], lengths: Sequence[int]) -> KeptTokenRows:
        """The view of one step: sequences in `slots`, of `lengths` tokens each."""
        both = list(zip(slots, lengths, strict=True))
        device = self._ends.device
        index = torch.tensor(slots, device=device)
        return KeptTokenRows(
            kept=self._kept[:, index],
            tokens=self._tokens[:, index],
            counts=self._counts[:, index],
            ends=self._ends[index],
            places=self._places[:, index] if self._shares else None,
            positions=self._positions[:, index] if self._shares else None,
            unpaged=self._unpaged[index] if self._unpaged.shape[1] else None,
            lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            most=max(n - self._dropped[slot] for slot, n in both),
            most_anywhere=max(n - self._lost[slot] for slot, n in both),
        )


class KeptTokenRows:
    """The tokens that the sequences of one step have, [L, B, ...]; makes selections from them.

    unpaged: int32 [B, C], slots of tokens in `UnpagedKeys`, -1 for others; None if no prompt has
    such tokens.
    """

    def __init__(
        self,
        *,
        kept: Tensor,
        tokens: Tensor,
        counts: Tensor,
        ends: Tensor,
        places: Tensor | None,
        positions: Tensor | None,
        unpaged: Tensor | None,
        lengths: Tensor,
        most: int,
        most_anywhere: int,
    ) -> None:
        self.unpaged = unpaged
        self._kept = kept
        self._tokens = tokens
        self._counts = counts
        self._ends = ends[:, None]
        self._places = places
        self._positions = positions
        self._lengths = lengths[:, None]
        self._most = [most] * (len(kept) - 1) + [most_anywhere]
        # Cached: layers request it repeatedly, and the prefetcher compares selections by identity.
        self._listed: dict[tuple[int, int | None], Selection] = {}
        self._found: dict[tuple[int, Selection], Selection] = {}

    def on(self, place: torch.device) -> KeptTokenRows:
        """The same for layers on another device."""
        found = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(found, name, value.to(place))
        found._listed, found._found = {}, {}
        return found

    def anywhere(self) -> Selection:
        """The positions of all tokens that any layer has; unit 1."""
        return self.selection(-1)

    def selection(self, layer: int, window: int | None = None) -> Selection:
        """All tokens that a layer has, of its last `window` tokens if given; unit 1."""
        key = layer, window
        if key not in self._listed:
            self._listed[key] = self._selection(layer, window)
        return self._listed[key]

    def at_positions(self, layer: int, selection: Selection) -> Selection:
        """What a layer selected for others among its own places, as positions; unit 1."""
        assert self._positions is not None, "the policy says that layers share a selection"
        indices = self._mapped(self._positions[layer], _tokens(selection))
        return Selection(indices, (indices >= 0).sum(2, dtype=torch.int32), 1)

    def within(self, layer: int, selection: Selection) -> Selection:
        """The tokens of a selection of tokens or pages that a layer has; unit 1.

        The selection has places of this layer, or positions where layers share it.
        """
        key = layer, selection
        if key not in self._found:
            self._found[key] = self._within(layer, selection)
        return self._found[key]

    def _selection(self, layer: int, window: int | None) -> Selection:
        count = self._counts[layer][:, None]
        most = self._most[layer]
        entry = torch.arange(most, dtype=torch.int32, device=count.device)[None]
        indices = self._ends + entry - count
        listed = self._tokens[layer, :, :most]
        width = listed.shape[1]
        indices[:, :width] = torch.where(entry[:, :width] < count, listed, indices[:, :width])
        wanted = indices < self._lengths
        if window is not None:
            wanted &= indices >= self._lengths - window
        return _packed(indices[:, None], wanted[:, None])

    def _within(self, layer: int, selection: Selection) -> Selection:
        indices = _tokens(selection)
        if self._places is not None:
            indices = self._mapped(self._places[layer], indices)
        wanted = (indices >= 0) & (indices < self._lengths[:, None])
        found = _packed(indices, wanted & self._has(layer, indices))
        return dataclasses.replace(found, low_rank=selection.low_rank)

    def _mapped(self, table: Tensor, indices: Tensor) -> Tensor:
        """Maps tokens of documents by a table int32 [B, C]; later tokens are unchanged."""
        if table.shape[1] == 0:
            return indices
        known = indices.clamp(0, table.shape[1] - 1).long()
        found = table[:, None].expand(-1, indices.shape[1], -1).gather(2, known)
        return torch.where((indices >= 0) & (indices < self._ends[:, None]), found, indices)

    def pages(self, layer: int, num_pages: int, page_size: int) -> Tensor:
        """Whether a layer has any token of a page, bool [B, num_pages]."""
        size = num_pages * page_size
        indices = torch.arange(size, dtype=torch.int32, device=self._ends.device)
        has = self._has(layer, indices.expand(len(self._ends), 1, -1))[:, 0]
        there: Tensor = has.unflatten(1, (num_pages, page_size)).any(2)
        return there

    def _has(self, layer: int, indices: Tensor) -> Tensor:
        """Whether a layer has these tokens, bool as indices [B, H, n]."""
        kept = self._kept[layer]
        if kept.shape[1] == 0:
            return torch.ones_like(indices, dtype=torch.bool)
        places = indices.clamp(0, kept.shape[1] - 1).long()
        known = kept[:, None].expand(-1, indices.shape[1], -1).gather(2, places)
        return known | (indices >= self._ends[:, None])


def _tokens(selection: Selection) -> Tensor:
    """The tokens of a selection of tokens or pages, int32 [B, H, n], padded with -1."""
    indices = selection.indices
    if selection.unit == 1:
        return indices
    place = torch.arange(selection.unit, dtype=torch.int32, device=indices.device)
    tokens = indices[..., None] * selection.unit + place
    return torch.where(indices[..., None] < 0, -1, tokens).flatten(2)


def _packed(indices: Tensor, wanted: Tensor) -> Selection:
    """The wanted entries of ascending indices [B, H, n] first, then -1."""
    order = wanted.logical_not().to(torch.uint8).argsort(dim=2, stable=True)
    packed = indices.masked_fill(~wanted, -1).gather(2, order)
    counts = wanted.sum(2, dtype=torch.int32)
    return Selection(packed.int(), counts, 1)


def _widened(tensor: Tensor, width: int, value: int = 0) -> Tensor:
    short = width - tensor.shape[-1]
    return tensor if short <= 0 else torch.nn.functional.pad(tensor, (0, short), value=value)

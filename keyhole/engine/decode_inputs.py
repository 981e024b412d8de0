"""The inputs of a decode step: page tables, evictions, and the state per sequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.kept_tokens import KeptTokenRows, KeptTokenTable, RetainedPages
from keyhole.cache.layout import Geometry
from keyhole.cache.page_list import NO_PAGE
from keyhole.cache.pages import PageCache
from keyhole.engine.allocation import widest_window
from keyhole.engine.sequence import Sequence
from keyhole.policies.base import Policy


class PageTable:
    """Rows of page numbers, updated incrementally: a step does not convert whole lists."""

    def __init__(self, num_slots: int) -> None:
        self._rows = np.zeros((num_slots, 64), np.int32)
        # The array that each row was filled from. A re-admitted sequence has a new one.
        self._lists: list[array[int] | None] = [None] * num_slots
        self._filled = [0] * num_slots

    def rows(self, sequences: list[Sequence], width: int) -> np.ndarray:
        """A row per sequence, int32 [B, width]; missing pages are 0."""
        for sequence in sequences:
            self._update(sequence)
        return self._rows[[sequence.slot for sequence in sequences], :width]

    def forget(self, sequence: Sequence, entry: int) -> None:
        """Clears the entry of a page that the sequence has released."""
        self._rows[sequence.slot, entry] = 0

    def cut(self, sequence: Sequence) -> None:
        """Clears the entries of pages that were removed from the end of the sequence's list."""
        slot, count = sequence.slot, len(sequence.pages)
        self._rows[slot, count : self._filled[slot]] = 0
        self._filled[slot] = min(self._filled[slot], count)

    def renumber(self) -> None:
        """Refills all rows, after the pages were renumbered (`PageCache.pack`)."""
        self._filled = [0] * len(self._filled)

    def _update(self, sequence: Sequence) -> None:
        slot, pages = sequence.slot, sequence.pages
        if self._lists[slot] is not pages:
            self._lists[slot], self._filled[slot] = pages, 0
            self._rows[slot] = 0
        start = self._filled[slot]
        if start < len(pages):
            while len(pages) > self._rows.shape[1]:
                self._rows = np.pad(self._rows, ((0, 0), (0, self._rows.shape[1])))
            # A gap (`NO_PAGE`) becomes page 0, which is never read.
            self._rows[slot, start : len(pages)] = np.maximum(pages[start:], 0)
            self._filled[slot] = len(pages)


# Eviction, on the host, one row per slot. When a page is full and the next token would need one
# more page than the policy allows, the page that the policy names is evicted: full-attention layers
# no longer read it, and it is released once it has left the sliding windows of all layers.


class Eviction:
    """The retained generated pages of each sequence, bounded by the policy's page limit."""

    def __init__(self, policy: Policy, cache: PageCache, num_slots: int) -> None:
        self._policy = policy
        self._cache = cache
        self._window = widest_window(cache.geometry)
        width = int(self._allowed(np.ones(1, np.int64))[0])
        self._entries = np.zeros((num_slots, width), np.int64)
        self._counts = np.zeros(num_slots, np.int64)
        self._pinned = np.zeros(num_slots, np.int64)
        # The prompt's present pages, and the limit of these and the generated ones together.
        self._present = np.zeros(num_slots, np.int64)
        self._most = np.zeros(num_slots, np.int64)
        self._later: tuple[Tensor, np.ndarray, list[Sequence]] | None = None

    def view(
        self, decodes: list[Sequence], position: np.ndarray, fresh: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What is retained at `position`: entries, pages, pinned, due of `RetainedPages`.

        position int64 [B]; fresh bool [B], sequences in their first decode step, whose tokens
        are all prompt except the new one.
        """
        size = self._cache.page_size
        for i in np.flatnonzero(fresh):
            self._enter(decodes[i], int(position[i]))
        slots = np.asarray([sequence.slot for sequence in decodes])
        newest, pinned = position // size, self._pinned[slots]
        begins = newest >= pinned
        last = self._entries[slots, np.maximum(self._counts[slots] - 1, 0)]
        begins &= (self._counts[slots] == 0) | (last != newest)
        rows = slots[begins]
        self._entries[rows, self._counts[rows]] = newest[begins]
        self._counts[rows] += 1
        counts = self._counts[slots]
        pages = pinned + counts
        place = np.arange(pages.max())
        generated = np.clip(place - pinned[:, None], 0, self._entries.shape[1] - 1)
        entries = np.take_along_axis(self._entries[slots], generated, 1)
        entries = np.where(place < pinned[:, None], place, entries)
        entries = np.where(place < pages[:, None], entries, -1)
        due = (position + 1) % size == 0
        due &= self._present[slots] + counts >= self._most[slots]
        return entries, pages, pinned, due & (counts > 0)

    def later(self, victims: Tensor, due: np.ndarray, sequences: list[Sequence]) -> None:
        """Takes what a step evicts, for `evict`.

        victims int64 [B]: the index among a sequence's retained generated pages. due bool [B].
        """
        self._later = victims, due, sequences

    def evict(self) -> list[tuple[Sequence, int]]:
        """Evicts what is due of the last step; returns the sequences and entries that were freed.

        A sequence that ended meanwhile has none.
        """
        if self._later is None:
            return []
        (victims, due, every), self._later = self._later, None
        rows = [i for i in np.flatnonzero(due) if every[i].slot >= 0]
        return self._evict([every[i] for i in rows], victims.cpu().numpy()[rows]) if rows else []

    def _evict(self, sequences: list[Sequence], victims: np.ndarray) -> list[tuple[Sequence, int]]:
        slots = np.asarray([sequence.slot for sequence in sequences])
        rows, place = self._entries[slots], np.arange(self._entries.shape[1])
        gone = np.take_along_axis(rows, victims[:, None], 1)[:, 0]
        moved = np.minimum(place + (place >= victims[:, None]), len(place) - 1)
        self._entries[slots] = np.take_along_axis(rows, moved, 1)
        self._counts[slots] -= 1
        freed = []
        for sequence, entry in zip(sequences, gone.tolist(), strict=True):
            leaving = [*sequence.leaving, entry]
            free = [e for e in leaving if self._is_unseen(e, sequence.num_computed)]
            sequence.leaving = [e for e in leaving if e not in free]
            self._cache.release(sequence.pages[e] for e in free)
            for e in free:
                sequence.pages[e] = NO_PAGE
            sequence.evicted_pages += len(free)
            freed += [(sequence, e) for e in free]
        return freed

    def copy(self, other: Eviction) -> None:
        """Takes over the retained pages of another one's sequences, which have the same slots."""
        self._entries, self._counts = other._entries.copy(), other._counts.copy()
        self._pinned, self._present = other._pinned.copy(), other._present.copy()
        self._most = other._most.copy()

    def kept(self, sequence: Sequence) -> Tensor | None:
        """The tokens of a sequence that each layer still has, bool [L, N]; None: all.

        For a sequence that continues with all of its tokens as prompt.
        """
        pages = np.asarray(sequence.pages, np.int64)
        there = np.tile(pages != NO_PAGE, (self._cache.geometry.num_layers, 1))
        full = list(self._cache.geometry.full_attention)
        there[np.ix_(full, sequence.leaving)] = False
        kept = torch.from_numpy(there.repeat(self._cache.page_size, 1))
        kept = kept[:, : sequence.num_computed]
        if sequence.kept is not None:
            kept[:, : sequence.kept.shape[1]] &= sequence.kept
        return None if kept.all() else kept

    def _enter(self, sequence: Sequence, position: int) -> None:
        slot, size = sequence.slot, self._cache.page_size
        pinned = -(-position // size)
        self._pinned[slot], self._counts[slot], self._present[slot] = pinned, 0, pinned
        if sequence.kept is not None:
            read = np.ones(pinned * size, bool)
            layers = list(self._cache.geometry.full_attention)
            read[: sequence.kept.shape[1]] = sequence.kept[layers].any(0).numpy()
            self._present[slot] = max(1, read.reshape(-1, size).any(1).sum())
        self._most[slot] = self._allowed(self._present[slot : slot + 1])[0]

    def _allowed(self, prompt_pages: np.ndarray) -> np.ndarray:
        allowed = self._policy.page_limit(prompt_pages, self._cache.page_size)
        assert allowed is not None
        return allowed

    def _is_unseen(self, entry: int, position: int) -> bool:
        """Whether an entry is outside of all sliding windows from `position` on."""
        return (entry + 1) * self._cache.page_size - 1 <= position - self._window


class SequenceState:
    """The policy's state: tensors by name, [slots, ...], and the prompt length of each slot."""

    def __init__(self, policy: Policy, geometry: Geometry, num_slots: int, like: Tensor) -> None:
        """like: any tensor of the keys' dtype and device."""
        self.tensors = {
            name: like.new_zeros(
                num_slots, *data.shape, dtype=like.dtype if data.like_keys else torch.int32
            )
            for name, data in policy.sequence_state(geometry).items()
        }
        # The pages of each slot's last sequence. A re-admitted sequence has a new array.
        self._lists: list[array[int] | None] = [None] * num_slots
        self._prompts = [0] * num_slots

    def copy(self, other: SequenceState, pairs: Iterable[tuple[Sequence, Sequence]]) -> None:
        """Takes over what another state knows of its sequences, each for one of ours."""
        for name, tensor in other.tensors.items():
            self.tensors[name].copy_(tensor)
        self._prompts = [*other._prompts]
        for theirs, own in pairs:
            known = other._lists[theirs.slot] is theirs.pages
            self._lists[own.slot] = own.pages if known else None

    def enter(self, sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """Which sequences are in their first decode step, bool [B].

        And the tokens computed before that step, int64 [B].
        """
        fresh = [self._lists[s.slot] is not s.pages for s in sequences]
        for sequence, new in zip(sequences, fresh, strict=True):
            self._lists[sequence.slot] = sequence.pages
            if new:
                self._prompts[sequence.slot] = sequence.num_computed
        prompts = [self._prompts[s.slot] for s in sequences]
        return np.asarray(fresh, bool), np.asarray(prompts, np.int64)


class KeptTokens:
    """What each layer has of the sequences, a row per slot; updated as sequences change slots."""

    def __init__(
        self, policy: Policy, num_layers: int, num_slots: int, device: torch.device
    ) -> None:
        shares = policy.selects in ("by_scores", "positions")
        self._table = KeptTokenTable(num_layers, num_slots, device, shares=shares)
        # What each row was filled from.
        self._kept: list[Tensor | None] = [None] * num_slots

    def rows(self, sequences: list[Sequence], lengths: np.ndarray) -> KeptTokenRows | None:
        """Of the first `lengths` tokens, int64 [B], of decoding sequences; None: everything."""
        for sequence in sequences:
            if self._kept[sequence.slot] is not sequence.kept:
                self._kept[sequence.slot] = sequence.kept
                if sequence.kept is None:
                    self._table.clear(sequence.slot)
                else:
                    unpaged = None if sequence.unpaged is None else sequence.unpaged.table
                    self._table.set(sequence.slot, sequence.kept, sequence.packing, unpaged)
        if all(sequence.kept is None for sequence in sequences):
            return None
        slots = [sequence.slot for sequence in sequences]
        return self._table.rows(slots, lengths.tolist())


@dataclass(frozen=True)
class DecodeInputs:
    """B tokens of decoding sequences, which have up to M pages.

    position, prompts: int64 [B], the position of the token, and the number of tokens before the
    first decode step.
    fresh: bool [B], whether this one is the first.
    sent: what the device gets, by name. As in `Step`: lengths, pages, page_table, prompts and
    state_rows (its `slots`). As in `RetainedPages`, where pages are evicted: left_table,
    left_pages, left_lengths, pinned, goes. written: as in `Batch`: slots, touched, filled. entries,
    due: as in `RetainedPages`; None where nothing is evicted.
    """

    position: np.ndarray
    prompts: np.ndarray
    fresh: np.ndarray
    sent: dict[str, np.ndarray]
    written: dict[str, np.ndarray]
    entries: np.ndarray | None = None
    due: np.ndarray | None = None

    def retained(self, tensors: Mapping[str, Tensor]) -> RetainedPages | None:
        """The pages that are left, for the step; tensors: `sent` on the device."""
        if self.entries is None or self.due is None:
            return None
        generated = self.sent["left_pages"] - self.sent["pinned"]
        return RetainedPages(
            page_table=tensors["left_table"],
            pages=tensors["left_pages"],
            lengths=tensors["left_lengths"],
            pinned=tensors["pinned"],
            goes=tensors["goes"],
            entries=self.entries,
            most_generated=int(generated.max()),
            due=self.due,
        )


class InputsAhead(NamedTuple):
    """The inputs of a step, made before the step."""

    rows: list[Sequence]
    pages: list[array[int]]
    inputs: DecodeInputs

    def is_of(self, rows: list[Sequence]) -> bool:
        """Whether these are the rows, with the same lists of pages, one token further."""
        return (
            self.rows == rows
            and all(s.pages is pages for s, pages in zip(rows, self.pages, strict=True))
            and self.inputs.position.tolist() == [s.num_computed for s in rows]
        )


def places_of(rows: list[Sequence]) -> tuple[np.ndarray, np.ndarray]:
    """The position of each row's token, and the length of its sequence after the step: int64 [B].

    A sequence that stands in several rows, one after another, computes consecutive tokens.
    """
    counts = np.asarray([len(list(same)) for _, same in groupby(rows)], np.int64)
    ends = np.cumsum(counts)
    first = np.asarray([s.num_computed for s in rows], np.int64)
    ahead = np.arange(len(rows)) - np.repeat(ends - counts, counts)
    return first + ahead, first + np.repeat(counts, counts)


def inputs_of(
    rows: list[Sequence],
    page_size: int,
    table: PageTable,
    state: SequenceState,
    eviction: Eviction | None,
) -> DecodeInputs:
    """The inputs of a step. Call once per step: it updates `state` and `eviction`.

    rows: the sequence of each token (`SchedulerOutput.rows`).
    """
    position, end = places_of(rows)
    fresh, prompts = state.enter(rows)
    entry, place = position // page_size, position % page_size
    pages = table.rows(rows, int(entry.max()) + 1)
    page = pages[np.arange(len(rows)), entry].astype(np.int64)
    sent = {
        "lengths": (position + 1).astype(np.int32),
        "pages": (entry + 1).astype(np.int32),
        "page_table": pages,
        "prompts": prompts.astype(np.int32),
        "state_rows": np.asarray([s.slot for s in rows], np.int64),
    }
    # A page that several rows write is listed with all of their tokens each time.
    filled = np.minimum(end - entry * page_size, page_size)
    written = {"slots": page * page_size + place, "touched": page, "filled": filled}
    if eviction is None:
        return DecodeInputs(position, prompts, fresh, sent, written)
    entries, counts, pinned, due = eviction.view(rows, position, fresh)
    left = np.take_along_axis(pages, np.maximum(entries, 0), 1)
    sent |= {
        "left_table": np.where(entries < 0, 0, left),
        "left_pages": counts.astype(np.int32),
        "left_lengths": (counts * page_size - (page_size - 1 - place)).astype(np.int32),
        "pinned": pinned,
        "goes": due,
    }
    return DecodeInputs(position, prompts, fresh, sent, written, entries, due)


def inputs_ahead(
    rows: list[Sequence], page_size: int, table: PageTable, state: SequenceState
) -> InputsAhead | None:
    """The inputs of the step after this one, if it has the same rows; None: a page is missing."""
    if any(len(s.pages) * page_size <= s.num_computed for s in rows):
        return None
    inputs = inputs_of(rows, page_size, table, state, None)
    return InputsAhead([*rows], [s.pages for s in rows], inputs)

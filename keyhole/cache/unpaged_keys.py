"""Keys of single tokens for which a sequence holds no page.

The retrieval head has one list of keys for all layers, in the pages of its tokens. Packed pages
(`cache/packing.py`) hold what each layer keeps, and the head reads every token that any layer
keeps: more tokens than these pages have places. Keys of the rest are here, and the pages that their
memory amounts to are taken from the cache's limit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.pages import PageCache


class UnpagedKeys:
    """The unpaged keys of all prompts of a cache.

    keys: [capacity, H, D]; any slot may hold a token of any prompt.
    """

    def __init__(self, cache: PageCache, num_heads: int, head_dim: int) -> None:
        self._cache = cache
        self.keys = cache.empty.new_empty(0, num_heads, head_dim)
        self._free = np.zeros(0, np.int64)

    @property
    def in_use(self) -> int:
        """Slots that hold a token."""
        return len(self.keys) - len(self._free)

    def hold(self, positions: np.ndarray, length: int) -> UnpagedTokens | None:
        """Slots for the tokens at these positions of a prompt of `length` tokens before its end.

        None, with nothing changed, without memory.
        """
        if len(positions) > len(self._free) and not self._grow(len(positions)):
            return None
        slots, self._free = np.split(self._free, [len(positions)])
        table = torch.full((length,), -1, dtype=torch.int32)
        table[torch.from_numpy(positions)] = torch.from_numpy(slots).int()
        return UnpagedTokens(self, table, slots)

    def free(self, slots: np.ndarray) -> None:
        """Frees slots; without tokens left all memory is freed."""
        self._free = np.concatenate([slots, self._free])
        if not self.in_use:
            self.keys, self._free = self.keys[:0].clone(), np.zeros(0, np.int64)
            self._cache.reserve(0)

    def _grow(self, count: int) -> bool:
        """Makes room for `count` tokens more than are in use; twice as many as there were."""
        before = self._cache.reserved
        capacity = max(2 * len(self.keys), self.in_use + count)
        if not self._cache.reserve(self._num_pages(capacity)):
            capacity = self.in_use + count
            if not self._cache.reserve(self._num_pages(capacity)):
                return False
        try:
            keys = self.keys.new_empty(capacity, *self.keys.shape[1:])
        except BaseException:
            self._cache.reserve(before)
            raise
        keys[: len(self.keys)] = self.keys
        self._free = np.concatenate([self._free, np.arange(len(self.keys), capacity)])
        self.keys = keys
        return True

    def _num_pages(self, capacity: int) -> int:
        """The pages that so many keys amount to."""
        one = self.keys.shape[1:].numel() * self.keys.itemsize
        return -(-capacity * one // self._cache.page_bytes)


class UnpagedTokens:
    """The unpaged tokens of one prompt, shared by the sequences that begin with it.

    table: int32 [C], the slot of each position before its question, on the CPU; -1: it has a page,
    or no layer keeps it.
    """

    def __init__(self, keys: UnpagedKeys, table: Tensor, slots: np.ndarray) -> None:
        self.table = table
        self._keys = keys
        self._slots = slots
        self._holders = 1

    @property
    def is_held(self) -> bool:
        """Whether any sequence holds it."""
        return self._holders > 0

    def share(self) -> UnpagedTokens:
        """Adds a holder."""
        assert self.is_held, "its keys are gone"
        self._holders += 1
        return self

    def release(self) -> None:
        """Drops a holder; after the last one the slots are free."""
        assert self.is_held, "its keys are gone already"
        self._holders -= 1
        if not self._holders:
            self._keys.free(self._slots)

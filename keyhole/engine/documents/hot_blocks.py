"""Blocks of stored keys and values that were read last, in memory of the model's device."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

#: Keys and values of some tokens of a layer; no values for MLA.
Rows = tuple[Tensor, Tensor | None]
#: The identity of a record, layer and block.
BlockKey = tuple[str, int, int]


class HotBlocks:
    """Blocks as they are stored, without the rotation to a prompt, for all prompts of an engine.

    A block that is used again needs neither its file nor a copy to the device. limit_bytes: of all
    blocks; the least recently used ones are dropped. num_bytes: what they take.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.num_bytes = 0
        self.limit_bytes = limit_bytes
        self._blocks: OrderedDict[BlockKey, Rows] = OrderedDict()

    def get(self, key: BlockKey) -> Rows | None:
        """The rows of a block, which must not be changed; None if they are not here."""
        found = self._blocks.get(key)
        if found is not None:
            self._blocks.move_to_end(key)
        return found

    def put(self, key: BlockKey, rows: Rows) -> None:
        """Keeps a block that is not here; drops others, or this one if it is too large."""
        assert key not in self._blocks, "a block is read once"
        self._blocks[key] = rows
        self.num_bytes += _size(rows)
        while self.num_bytes > self.limit_bytes:
            _, dropped = self._blocks.popitem(last=False)
            self.num_bytes -= _size(dropped)


def _size(rows: Rows) -> int:
    return sum(part.nbytes for part in rows if part is not None)

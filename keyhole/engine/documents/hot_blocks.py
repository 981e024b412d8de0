"""Blocks of stored keys and values that were read last, on the model's device and on the host."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

#: Keys and values of some tokens of a layer; no values for MLA.
Rows = tuple[Tensor, Tensor | None]
#: The identity of a record, layer and block.
BlockKey = tuple[str, int, int]


class HotBlocks:
    """Blocks as they are stored, without the rotation to a prompt, for all prompts of an engine.

    A block that is used again needs neither its file nor a copy to the device. limit_bytes: of all
    blocks; the least recently used ones are dropped. num_bytes: what they take. host: where dropped
    blocks go.
    """

    def __init__(self, limit_bytes: int, host: HostBlocks | None = None) -> None:
        self.num_bytes = 0
        self.limit_bytes = limit_bytes
        self._host = host
        self._blocks: OrderedDict[BlockKey, Rows] = OrderedDict()

    def get(self, key: BlockKey) -> Rows | None:
        """The rows of a block, which must not be changed; None if they are not kept here."""
        found = self._blocks.get(key)
        if found is not None:
            self._blocks.move_to_end(key)
            return found
        found = None if self._host is None else self._host.take(key)
        if found is not None:
            self.put(key, found)
        return found

    def put(self, key: BlockKey, rows: Rows) -> None:
        """Keeps a block that is not here; drops others, or this one if it is too large."""
        assert key not in self._blocks, "a block is read once"
        self._blocks[key] = rows
        self.num_bytes += _size(rows)
        while self.num_bytes > self.limit_bytes:
            dropped_key, dropped = self._blocks.popitem(last=False)
            self.num_bytes -= _size(dropped)
            if self._host is not None:
                self._host.put(dropped_key, dropped)


class HostBlocks:
    """Blocks that left the device, in memory of the host, pinned where there is a GPU.

    limit_bytes: of all blocks; the least recently dropped ones are freed. num_bytes: what they
    take.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.num_bytes = 0
        self.limit_bytes = limit_bytes
        self._blocks: OrderedDict[BlockKey, tuple[Rows, torch.device]] = OrderedDict()

    def put(self, key: BlockKey, rows: Rows) -> None:
        """Copies a block to the host, unless it alone is above the limit."""
        size = _size(rows)
        if size > self.limit_bytes:
            return
        while self.num_bytes + size > self.limit_bytes:
            _, (freed, _) = self._blocks.popitem(last=False)
            self.num_bytes -= _size(freed)
        keys, values = rows
        copies = _on_host(keys), None if values is None else _on_host(values)
        self._blocks[key] = copies, keys.device
        self.num_bytes += size

    def take(self, key: BlockKey) -> Rows | None:
        """Moves a block back to its device; None if it is not here."""
        found = self._blocks.pop(key, None)
        if found is None:
            return None
        (keys, values), device = found
        self.num_bytes -= _size((keys, values))
        return keys.to(device), None if values is None else values.to(device)


def _on_host(rows: Tensor) -> Tensor:
    """A copy on the host that is complete when this returns."""
    copy = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
    return copy.copy_(rows)


def _size(rows: Rows) -> int:
    return sum(part.nbytes for part in rows if part is not None)

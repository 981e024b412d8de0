"""Rows of stored documents on their way to the device: read ahead by threads, and those read last.

A file is copied from the system's memory at a few GB/s by one thread, less than a GPU takes. So
documents are read by several, straight into the memory that the device copies from, and the next
pieces while the engine works on the current one. Blocks that were read last are kept as they are
stored, on the model's device and on the host.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import numpy as np
import torch
from torch import Tensor

from keyhole.documents.store import StoredDocument

#: Keys and values of some tokens of a layer; no values for MLA.
Rows = tuple[Tensor, Tensor | None]
#: The identity of a record, layer and block.
BlockKey = tuple[str, int, int]

#: Tokens between two runs that are read along with them: one more read costs about as much.
_GAP = 16
#: Of one piece; more than memory can serve.
_THREADS = min(8, os.cpu_count() or 1)
#: Of pieces that are being read, and of one that the device copies.
_BUFFERS = 4
#: Parts of a buffer begin at multiples of this, as kernels want them.
_ALIGNMENT = 256


class ReadAhead:
    """Stored rows of a layer, being read.

    tokens: int64 [n], ascending: document i owns `starts[i] : starts[i + 1]`. numbers: int64 arrays
    [n] that go to the device along with the rows.
    """

    def __init__(
        self,
        ring: PinnedRing,
        documents: Sequence[StoredDocument],
        starts: np.ndarray,
        layer: int,
        tokens: np.ndarray,
        numbers: Sequence[np.ndarray],
    ) -> None:
        owners = np.searchsorted(starts, tokens, side="right") - 1
        breaks = (np.diff(tokens) > _GAP + 1) | (np.diff(owners) > 0)
        begins = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        ends = np.append(begins[1:], len(tokens))
        firsts, lasts = tokens[begins], tokens[ends - 1] + 1
        edges = np.concatenate([[0], np.cumsum(lasts - firsts)])
        if edges[-1] > len(tokens):  # unwanted ones are read, too: where the wanted ones are
            shift = np.repeat(edges[:-1] - firsts, ends - begins)
            numbers = [*numbers, tokens + shift]
        self._ring, self._spans = ring, documents[0].row_spans(layer)
        self._has_gaps, self._count = edges[-1] > len(tokens), len(numbers)
        widths = [(span.stop - span.start) // span.shape[0] for span in self._spans]
        sizes = [len(tokens) * 8] * len(numbers) + [int(edges[-1]) * width for width in widths]
        self._buffer = ring.take(sizes)
        for part, array in enumerate(numbers):
            own = np.ascontiguousarray(array, np.int64)
            self._buffer.memory(part)[:] = own.view(np.uint8).data
        rows = [self._buffer.memory(len(numbers) + i) for i in range(len(widths))]
        jobs = []
        owned = owners[begins]
        for i in np.unique(owned).tolist():
            its = np.flatnonzero(owned == i)
            runs = np.stack([firsts[its], lasts[its]], 1) - starts[i]
            begin, end = int(edges[its[0]]), int(edges[its[-1] + 1])
            out = [memory[begin * w : end * w] for memory, w in zip(rows, widths, strict=True)]
            jobs.append((documents[i], runs.tolist(), out))
        self._reads = [
            _pool(os.getpid()).submit(_read, layer, jobs[first::_THREADS])
            for first in range(min(_THREADS, len(jobs)))
        ]

    def rows(self) -> tuple[Rows, list[Tensor]]:
        """Keys and values of the tokens on the device, and the numbers.

        On a CPU, valid until the next piece is read. Raises what reading raised.
        """
        try:
            wait(self._reads)
            for read in self._reads:
                read.result()
        except BaseException:
            self.cancel()
            raise
        parts = self._ring.send(self._buffer)
        numbers = [part.view(torch.int64) for part in parts[: self._count]]
        found = [
            part.view(getattr(torch, span.dtype)).view(-1, *span.shape[1:])
            for part, span in zip(parts[self._count :], self._spans, strict=True)
        ]
        if self._has_gaps:
            places = numbers.pop()
            found = [part.index_select(0, places) for part in found]
        return (found[0], found[1] if len(found) > 1 else None), numbers

    def cancel(self) -> None:
        """Gives the buffer back instead, when no thread writes to it."""
        for read in self._reads:
            read.cancel()
        wait(self._reads)
        self._ring.put_back(self._buffer)


#: A document, its runs, and the memory for its keys and values.
_Job = tuple[StoredDocument, list[tuple[int, int]], list[memoryview]]


def _read(layer: int, jobs: Sequence[_Job]) -> None:
    for document, runs, out in jobs:
        document.read_rows(layer, runs, out)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process; a fork has none of its parent's."""
    return ThreadPoolExecutor(_THREADS, "documents")


class PinnedRing:
    """A few buffers, used in turn; in pinned host memory where there is a GPU.

    From pinned memory a GPU copies by itself. The host waits only if the copy that used the same
    buffer last has not ended. device: where their contents are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = deque(PinnedBuffer() for _ in range(_BUFFERS))

    def take(self, sizes: Sequence[int]) -> PinnedBuffer:
        """A buffer for parts of these sizes, the caller's own until `send` or `put_back`."""
        buffer = self._buffers.popleft() if self._buffers else PinnedBuffer()
        buffer.divide(sizes)
        return buffer

    def send(self, buffer: PinnedBuffer) -> list[Tensor]:
        """The parts of a buffer on the device, uint8, in the order of its current stream.

        On a CPU they are the buffer itself: valid until the next `take`.
        """
        if self.device.type == "cuda":
            there = buffer.whole.to(self.device, non_blocking=True)
            buffer.copied = torch.cuda.Event()
            buffer.copied.record(torch.cuda.current_stream(self.device))
        else:
            there = buffer.whole.to(self.device)
        self._buffers.append(buffer)
        return [there[part] for part in buffer.parts]

    def put_back(self, buffer: PinnedBuffer) -> None:
        """Returns a buffer that will not be sent; no thread may write to it any more."""
        self._buffers.append(buffer)


class PinnedBuffer:
    """Memory for one copy; it grows. copied: recorded behind the last copy from it.

    parts: where the parts of the last `divide` are. whole: uint8, all of them.
    """

    def __init__(self) -> None:
        self.copied: torch.cuda.Event | None = None
        self.parts: list[slice] = []
        self.whole = self._bytes = torch.empty(0, dtype=torch.uint8)

    def divide(self, sizes: Sequence[int]) -> None:
        """Makes room for parts of these bytes, after the last copy has ended."""
        if self.copied is not None:
            self.copied.synchronize()
        self.parts, end = [], 0
        for size in sizes:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + size
            self.parts.append(slice(start, end))
        if end > len(self._bytes):
            pins = torch.cuda.is_available()
            self._bytes = torch.empty(end, dtype=torch.uint8, pin_memory=pins)
        self.whole = self._bytes[:end]

    def memory(self, part: int) -> memoryview:
        """The bytes of a part, to be written."""
        return memoryview(self.whole.numpy().data)[self.parts[part]]


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

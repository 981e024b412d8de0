"""Memory from which rows of stored documents are copied to the device while others are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

#: Of pieces that are being read, and of one that the device copies.
_BUFFERS = 4
#: Parts of a buffer begin at multiples of this, as kernels want them.
_ALIGNMENT = 256


class PinnedRing:
    """A few buffers, used in turn; in pinned host memory where there is a GPU.

    From pinned memory a GPU copies by itself. The host waits only if the copy that used the same
    buffer last has not ended. device: where their contents are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = deque(PinnedBuffer() for _ in range(_BUFFERS))

    def take(self, sizes: Sequence[int]) -> PinnedBuffer:
        """A buffer for parts of these bytes, which nobody else has until `send` or `put_back`."""
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
        """Gives a buffer back that is not sent; nobody may write to it any more."""
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

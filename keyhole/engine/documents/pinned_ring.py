"""Copies rows of stored documents to the device while the next ones are read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import torch
from torch import Tensor

#: Keys and values of one piece that the device copies, and of the next that is being read.
_BUFFERS = 4


class PinnedRing:
    """A few buffers in pinned host memory, used in turn; on a CPU, none are needed.

    From pinned memory a GPU copies by itself. The host waits only if the copy that used the same
    buffer last has not ended. device: where rows are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = cycle([PinnedBuffer() for _ in range(_BUFFERS)])

    def send(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of these tensors, joined, on the device: [n, ...], a copy.

        Parts are on the CPU, or on the device already.

        On a GPU they arrive in the order of the current stream.
        """
        if self.device.type != "cuda":
            return torch.cat([*parts]).to(self.device)
        if any(part.is_cuda for part in parts):
            return torch.cat([part if part.is_cuda else self.send([part]) for part in parts])
        buffer = next(self._buffers)
        found = buffer.fill(parts).to(self.device, non_blocking=True)
        buffer.copied = torch.cuda.Event()
        buffer.copied.record()
        return found


class PinnedBuffer:
    """Memory for one copy; it grows. copied: recorded behind the last copy from it."""

    def __init__(self) -> None:
        self.copied: torch.cuda.Event | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def fill(self, parts: Sequence[Tensor]) -> Tensor:
        """The joined rows in this buffer, valid until the next `fill`."""
        if self.copied is not None:
            self.copied.synchronize()
        size = sum(part.nbytes for part in parts)
        if size > len(self._bytes):
            pins = torch.cuda.is_available()
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pins)
        shape = sum(len(part) for part in parts), *parts[0].shape[1:]
        rows = self._bytes[:size].view(parts[0].dtype).view(shape)
        torch.cat([*parts], out=rows)
        return rows

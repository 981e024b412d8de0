"""Fixed places for the numbers of a decode step, and rows that stand for no sequence.

A recorded step reads its numbers where they were when it was recorded. All of one shape lie in one
piece of memory, on the host and on the device, so that one copy brings them over.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

# Where each array begins; GPUs load 16 bytes at a time.
_ALIGNED = 16


class GraphBuffers:
    """Arrays of one shape each, at fixed places on a device.

    like: arrays by name, [n, ...] each, n up to `num_rows`; a second dimension is up to `widths`
    by name. nobody: by name, what a row holds that stands for no sequence.
    tensors: the arrays on the device, [num_rows, ...].
    """

    def __init__(
        self,
        like: Mapping[str, np.ndarray],
        num_rows: int,
        widths: Mapping[str, int],
        nobody: Mapping[str, int],
        device: torch.device,
    ) -> None:
        shapes = {
            name: (num_rows, widths[name]) if array.ndim > 1 else (num_rows,)
            for name, array in like.items()
        }
        sizes = {name: like[name].itemsize * int(np.prod(shapes[name])) for name in like}
        total = sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes.values())
        pinned = device.type == "cuda"
        self._host = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.empty(total, dtype=torch.uint8, device=device)
        self._arrays: dict[str, np.ndarray] = {}
        self.tensors: dict[str, Tensor] = {}
        start = 0
        for name, size in sizes.items():
            place, dtype = slice(start, start + size), torch.from_numpy(like[name]).dtype
            self.tensors[name] = self._device[place].view(dtype).view(shapes[name])
            self._arrays[name] = self._host[place].view(dtype).view(shapes[name]).numpy()
            start += -(-size // _ALIGNED) * _ALIGNED
        self._nobody = nobody
        self._copied = torch.cuda.Event() if pinned else None

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Puts the arrays in their places; all rows and columns after them are nobody's."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read here
        for name, place in self._arrays.items():
            if name in arrays:
                array, nobody = arrays[name], self._nobody[name]
                place[tuple(slice(n) for n in array.shape)] = array
                place[len(array) :] = nobody
                if array.ndim > 1:
                    place[:, array.shape[1] :] = nobody
            else:
                place.fill(self._nobody[name])
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))

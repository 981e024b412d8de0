"""The inputs of a decode step: on the host, in the fixed buffers of a graph, and per sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.layout import Geometry
from keyhole.engine.memory.page_table import Eviction, PageTable
from keyhole.engine.sequence import Sequence
from keyhole.policies.base import Policy


@dataclass(frozen=True)
class DecodeInputs:
    """One token of each of B sequences, which have up to M pages.

    position, prompts: int64 [B], where the token stands, and tokens before the first decode step.
    fresh: bool [B], whether this one is the first.
    sent: what the device gets, by name. As in `Step`: lengths, pages, page_table, prompts and
    state_rows (its `slots`). As in `Remaining`, where pages are evicted: left_table, left_pages,
    left_lengths, pinned, goes. written: as in `Batch`: slots, touched, filled.
    entries, due: as in `Remaining`; None where nothing is evicted.
    """

    position: np.ndarray
    prompts: np.ndarray
    fresh: np.ndarray
    sent: dict[str, np.ndarray]
    written: dict[str, np.ndarray]
    entries: np.ndarray | None = None
    due: np.ndarray | None = None


def numbers_of(
    decodes: list[Sequence],
    page_size: int,
    table: PageTable,
    state: SequenceState,
    eviction: Eviction | None,
) -> DecodeInputs:
    """For at least one sequence; once a step, as sequences enter `state` and `eviction` by it."""
    position = np.asarray([s.num_computed for s in decodes], np.int64)
    fresh, prompts = state.enter(decodes)
    entry, place = position // page_size, position % page_size
    rows = table.rows(decodes, int(entry.max()) + 1)
    page = rows[np.arange(len(rows)), entry].astype(np.int64)
    sent = {
        "lengths": (position + 1).astype(np.int32),
        "pages": (entry + 1).astype(np.int32),
        "page_table": rows,
        "prompts": prompts.astype(np.int32),
        "state_rows": np.asarray([s.slot for s in decodes], np.int64),
    }
    written = {"slots": page * page_size + place, "touched": page, "filled": place + 1}
    if eviction is None:
        return DecodeInputs(position, prompts, fresh, sent, written)
    entries, pages, pinned, due = eviction.view(decodes, position, fresh)
    left = np.take_along_axis(rows, np.maximum(entries, 0), 1)
    sent |= {
        "left_table": np.where(entries < 0, 0, left),
        "left_pages": pages.astype(np.int32),
        "left_lengths": (pages * page_size - (page_size - 1 - place)).astype(np.int32),
        "pinned": pinned,
        "goes": due,
    }
    return DecodeInputs(position, prompts, fresh, sent, written, entries, due)


# Fixed places for the numbers of a decode step, and rows that stand for no sequence.
#
# A recorded step reads its numbers where they were when it was recorded. All of one shape lie in
# one piece of memory, on the host and on the device, so that one copy brings them over.


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


class SequenceState:
    """Tensors by name, [slots, ...], as the policy declared them, and lengths of prompts."""

    def __init__(self, policy: Policy, geometry: Geometry, num_slots: int, like: Tensor) -> None:
        """like: any tensor of the keys' dtype and device."""
        whole, numbers = policy.sequence_state(geometry), policy.sequence_numbers(geometry)
        assert not whole.keys() & numbers.keys(), "names of state must differ"
        self.tensors = {
            name: like.new_zeros(num_slots, *shape, dtype=torch.int32)
            for name, shape in whole.items()
        }
        self.tensors |= {n: like.new_zeros(num_slots, *shape) for n, shape in numbers.items()}
        # Whose pages stood in a row last. A sequence that leaves and comes back has a new list.
        self._lists: list[list[int] | None] = [None] * num_slots
        self._prompts = [0] * num_slots

    def enter(self, sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """Which of these sequences are here for the first time, bool [B].

        And how many tokens each had computed then, int64 [B].
        """
        fresh = [self._lists[s.slot] is not s.pages for s in sequences]
        for sequence, new in zip(sequences, fresh, strict=True):
            self._lists[sequence.slot] = sequence.pages
            if new:
                self._prompts[sequence.slot] = sequence.num_computed
        prompts = [self._prompts[s.slot] for s in sequences]
        return np.asarray(fresh, bool), np.asarray(prompts, np.int64)

"""Decode steps recorded once as CUDA graphs and replayed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.pages import PageCache
from keyhole.engine.decode_inputs import DecodeInputs, InputsAhead
from keyhole.kernels.graph_capture import without_collection
from keyhole.policies.base import Policy, Step

# Decode steps that are recorded once and repeated: CUDA graphs on a GPU.
#
# A step that only decodes does the same work as the one before, on other numbers. So it is recorded
# for a number of sequences and of pages, each rounded up, and for the policy's `capture_key`; after
# that its inputs are copied to where the recording reads them (`GraphBuffers`), and it is replayed.
# Padding rows use a page and a row of the policy's state that no sequence reads.
# What the host keeps of a step (lengths, pages, evictions, counters) is not in the recording: the
# runner does it in every step, recorded or not.
#
# Everything is captured again when the cache's tensors have moved, or a layer changes tier.


# The number of shapes that are kept; the least recently used one is dropped.
_MOST = 32


# The alignment of each array in bytes: GPUs load 16 bytes at a time.
_ALIGNED = 16


class GraphBuffers:
    """The inputs of a graph, at fixed addresses.

    A graph reads its inputs from the addresses at which it was captured. The inputs of one shape
    share one buffer on the host and one on the device, so that a single copy transfers them.

    like: arrays by name, [n, ...] each, n up to `num_rows`; a second dimension is up to `widths`
    by name. padding: by name, the value of padding rows and columns.
    tensors: the arrays on the device, [num_rows, ...].
    """

    def __init__(
        self,
        like: Mapping[str, np.ndarray],
        num_rows: int,
        widths: Mapping[str, int],
        padding: Mapping[str, int],
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
        self._padding = padding
        self._copied = torch.cuda.Event() if pinned else None

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies the arrays to the device; the remaining arrays, rows and columns are padding."""
        self.fill(arrays)
        for name, place in self._arrays.items():
            if name not in arrays:
                place.fill(self._padding[name])
        self.send()

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes some arrays, with padding for their remaining rows and columns, for `send`."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read here
        for name, array in arrays.items():
            place, padding = self._arrays[name], self._padding[name]
            if place.shape == array.shape:
                place[...] = array
                continue
            place[tuple(slice(n) for n in array.shape)] = array
            place[len(array) :] = padding
            if array.ndim > 1:
                place[:, array.shape[1] :] = padding

    def send(self) -> None:
        """Copies all arrays to the device."""
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))


@dataclass(frozen=True)
class Outputs:
    """Outputs of B rows: logits [B, vocabulary], reads float64 [B, 3], victims int64 [B].

    loads: as `Loads.counters`; None where no layer is offloaded.
    The next replay of any graph overwrites them.
    """

    logits: Tensor
    reads: Tensor
    victims: Tensor | None
    loads: Tensor | None = None


Work = Callable[[], Outputs]


class Recorder(Protocol):
    """Captures work. Its inputs are padding during the capture, so it may run several times."""

    def record(self, work: Work) -> Work:
        """A function that replays the work on the current inputs. RuntimeError on failure."""
        ...

    def forget(self) -> None:
        """Frees the captured graphs; they cannot be replayed afterwards."""
        ...


class _Shape(NamedTuple):
    """The input buffers of one shape, and a graph for each `capture_key` of the policy."""

    inputs: GraphBuffers
    ways: dict[Hashable, Work]


class CudaGraphRunner:
    """The captured steps of one runner. replayed: the number of replayed steps.

    num_slots: sequences that have rows in the policy's state; the row after these is for padding.
    num_rows: the most tokens of a step. make_step: makes a `Step` from inputs on the device.
    work: runs a step. moves: how often tensors that a step reads or writes have been replaced so
    far. why_not: why steps are not captured; None while they are.
    """

    def __init__(
        self,
        recorder: Recorder,
        cache: PageCache,
        policy: Policy,
        num_slots: int,
        num_rows: int,
        device: torch.device,
        make_step: Callable[[DecodeInputs, Mapping[str, Tensor]], Step],
        work: Callable[[Mapping[str, Tensor], Step], Outputs],
        moves: Callable[[], int],
    ) -> None:
        self._recorder = recorder
        self._count_moves = moves
        self._policy = policy
        self._num_slots = num_slots
        self._num_rows = num_rows
        self._device = device
        self._make_step = make_step
        self._work = work
        self._cache = cache
        self.why_not: str | None = None
        if not self._set_aside():
            self.why_not = "the cache has no page to set aside"
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        # The inputs that `look_ahead` took.
        self._ahead: DecodeInputs | None = None
        self._logits: Tensor | None = None
        self._moves = moves()
        self.replayed = 0

    def run(self, numbers: DecodeInputs, token_ids: np.ndarray) -> Outputs | None:
        """Replays the step of these tokens; None: it cannot be captured, and was not run.

        token_ids: int64 [B].
        """
        if self.why_not is not None:
            return None
        if self._moves != self._count_moves():
            self._forget()
        ahead, self._ahead = self._ahead, None
        arrays, tokens = _arrays(numbers), {"token_ids": token_ids}
        inputs, ways = self._shape(arrays | tokens)
        step = self._make_step(numbers, inputs.tensors)
        way = self._policy.capture_key(step)
        if way is None:
            return None
        is_there = ahead is numbers and way in ways
        if way not in ways:
            inputs.load({})
            try:
                ways[way] = self._recorder.record(
                    functools.partial(self._work_into_place, inputs.tensors, step)
                )
            except RuntimeError as error:
                self._give_up(_reason(error))
                return None
        if is_there:
            inputs.fill(tokens)
            inputs.send()
        else:
            inputs.load(arrays | tokens)
        self.replayed += 1
        return ways[way]()

    def look_ahead(self, ahead: InputsAhead | None) -> None:
        """Takes the inputs of the next step, all but its tokens, if their shape was captured."""
        if ahead is None:
            return
        arrays = _arrays(ahead.inputs)
        shape = self._shapes.get(self._key(arrays, len(ahead.rows)))
        if shape is not None:
            shape.inputs.fill(arrays)
            self._ahead = ahead.inputs

    def _key(self, arrays: Mapping[str, np.ndarray], count: int) -> tuple[int, ...]:
        widths = (width_bucket(x.shape[1]) for x in arrays.values() if x.ndim > 1)
        return (batch_bucket(count, self._num_rows), *widths)

    def _shape(self, arrays: Mapping[str, np.ndarray]) -> _Shape:
        """The buffers and graphs for arrays of this shape; evicts the least recently used shape."""
        rows, *widths = key = self._key(arrays, len(arrays["token_ids"]))
        shape = self._shapes.pop(key, None)
        if shape is None:
            wide = dict(zip((n for n, x in arrays.items() if x.ndim > 1), widths, strict=True))
            shape = _Shape(GraphBuffers(arrays, rows, wide, self._padding_row, self._device), {})
        self._shapes[key] = shape
        if len(self._shapes) > _MOST:
            del self._shapes[next(iter(self._shapes))]
        return shape

    def _work_into_place(self, tensors: Mapping[str, Tensor], step: Step) -> Outputs:
        """Runs a step and copies its logits to one buffer that all graphs share, to save memory."""
        found = self._work(tensors, step)
        rows, width = found.logits.shape
        if self._logits is None:  # allocated in the first run, before capture
            self._logits = found.logits.new_empty(self._num_rows, width)
        return replace(found, logits=self._logits[:rows].copy_(found.logits))

    def _set_aside(self) -> bool:
        """Reserves a page for padding rows; False if there is none."""
        page = self._cache.set_aside()
        self._padding_row = _padding_row(page or 0, self._cache.page_size, self._num_slots)
        return page is not None

    def _forget(self) -> None:
        self._moves = self._count_moves()
        self._set_aside()  # the page may have another number
        self._shapes.clear()
        self._ahead = None
        self._recorder.forget()

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self._forget()
        warnings.warn(
            "decode steps cannot be recorded as CUDA graphs and are launched one by one, which is "
            f"slower: {why.splitlines()[0] if why else 'no reason given'}",
            RuntimeWarning,
            stacklevel=2,
        )


def _arrays(numbers: DecodeInputs) -> dict[str, np.ndarray]:
    """All inputs of a step except its tokens."""
    return numbers.sent | numbers.written | {"positions": numbers.position}


def _reason(error: BaseException) -> str:
    """The first error: a failed capture also fails to end, with a less useful message."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return str(error)


def batch_bucket(count: int, most: int) -> int:
    """Rows of a graph for `count` tokens, of which a step has at most `most`."""
    rounded = 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8
    return min(rounded, most)


def width_bucket(pages: int) -> int:
    """The page capacity of the graph for `pages` pages; from 64 on at most a quarter larger."""
    step = max(16, (1 << (pages - 1).bit_length()) // 8)
    return -(-pages // step) * step


def _padding_row(page: int, page_size: int, state_row: int) -> dict[str, int]:
    """The values of a padding row: a sequence of one token in a reserved page."""
    return {
        "token_ids": 0,
        "positions": 0,
        "lengths": 1,
        "pages": 1,
        "page_table": page,
        "prompts": 0,
        "state_rows": state_row,
        "slots": page * page_size,
        "touched": page,
        "filled": 1,
        "left_table": page,
        "left_pages": 1,
        "left_lengths": 1,
        "pinned": 1,
        "goes": 0,
    }


class CudaGraphs:
    """Captures launches on a GPU as CUDA graphs, in one memory pool.

    Graphs are replayed one after the other, and the outputs of one are read before the next runs,
    so they can share the memory of their intermediate tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """Begins a new pool: torch does not reuse one whose graphs have all been freed."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Work:
        """Runs the work, then captures it; RuntimeError if it waits for the device.

        This is checked before the capture begins: a failed capture leaves torch's allocator in a
        state in which it never frees memory that several streams have used.
        """
        with torch.cuda.device(self._device):
            return self._record(work)

    def _record(self, work: Work) -> Work:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        before = torch.cuda.get_sync_debug_mode()
        try:
            with torch.cuda.stream(self._stream):
                work()  # compiles kernels and allocates the libraries' workspaces
                torch.cuda.set_sync_debug_mode("error")
                work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (a server's, a copying one) may call what is forbidden during capture.
        mode = "thread_local"
        try:
            with (
                without_collection(),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode=mode
                ),
            ):
                outputs = work()
        finally:
            torch.cuda.set_stream(current)  # a failed capture leaves its own stream set

        def repeat() -> Outputs:
            graph.replay()
            return outputs

        return repeat


def make_recorder(device: torch.device) -> Recorder | None:
    """The recorder of a device; None where launches cost little (a CPU)."""
    return CudaGraphs(device) if device.type == "cuda" else None

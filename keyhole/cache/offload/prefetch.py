"""Elastic loading ahead of time: copies for later layers run while earlier ones compute.

SpeContext, section 5: a selection that is known before layer 0 lets all offloaded layers be
loaded in their order, beside the computation. What is not started ahead, since a policy chooses in
the layer, or is started with another selection, is loaded when it is waited for: starting is never
needed for a right result.

One thread starts the copies. On a CPU it makes them, too; on a GPU they run on a stream of their
own, between two events: they begin when all that was launched before `start` is done, so the last
step's attention no longer reads the buffer, and attention begins when they are done. In a step that
is recorded there is no thread, as what it launches would not be recorded; stream and events are
the same, and so are the copies beside the computation when the step is repeated.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.cache.offload.resident_buffer import Frame, Resident, ResidentBuffer
from keyhole.cache.offload.tiers import Tier
from keyhole.cache.pages import PageCache
from keyhole.errors import CapacityError
from keyhole.kernels import Selection
from keyhole.planner import buffer_tokens


@dataclass(frozen=True)
class Traffic:
    """What elastic loading did. Tokens count once per layer and KV head.

    hits: selected tokens that were there already. misses: those that were copied, moved_bytes in
    all. stall_ms: how long attention waited for them.
    """

    hits: int = 0
    misses: int = 0
    moved_bytes: int = 0
    stall_ms: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.hits + other.hits,
            self.misses + other.misses,
            self.moved_bytes + other.moved_bytes,
            self.stall_ms + other.stall_ms,
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of the selected tokens that were there already; None if nothing was selected."""
        selected = self.hits + self.misses
        return self.hits / selected if selected else None


class Loads(NamedTuple):
    """What a step loaded, as the device has it.

    counters: int64 [B, 3], hits, misses and moved bytes of each sequence. stall_ms: as in
    `Traffic`; 0 for a step that was repeated from a recording, in which the device alone waits.
    """

    counters: Tensor
    stall_ms: float = 0.0


@dataclass(frozen=True)
class _Load:
    """A copy under way, and what keeps its tensors alive. loaded: its end on a GPU."""

    selection: Selection
    result: Future[Resident]
    loaded: torch.cuda.Event | None


class Prefetcher:
    """The buffers of all offloaded layers of a cache.

    A step is `begin`, any number of `start`, a `wait` for each layer that attends to a selection,
    `end`. Called by one thread.

    num_rows: sequences that can run at once. token_budget: most tokens of a selection. num_heads:
    see `ResidentBuffer`. total: the traffic of all steps that were counted.
    """

    def __init__(
        self,
        cache: PageCache,
        *,
        num_rows: int,
        token_budget: int,
        num_heads: int | None = None,
    ) -> None:
        self._cache = cache
        self._num_rows = num_rows
        self._num_tokens = buffer_tokens(token_budget, cache.page_size)
        self._num_heads = num_heads
        self._buffers: dict[int, ResidentBuffer] = {}
        self._cuts = 0  # of buffers that are gone
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keyhole-prefetch")
        self._stream: torch.cuda.Stream | None = None
        self._step: tuple[Tensor, Tensor, Tensor] | None = None
        self._frames: dict[int, Frame] = {}
        self._loads: dict[int, _Load] = {}
        self._done: list[tuple[int, Resident]] = []
        self._stall = 0.0
        self._recorded = False
        self.total = Traffic()

    def __contains__(self, layer: int) -> bool:
        return layer in self._buffers

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have buffers, in order."""
        return tuple(sorted(self._buffers))

    @property
    def moves(self) -> int:
        """How often a buffer was cut anew; what was recorded before then writes to old places."""
        return self._cuts + sum(buffer.cuts for buffer in self._buffers.values())

    def offload(self, layer: int, tier: Tier) -> None:
        """Offloads a layer of the cache, and gives it buffers where it was.

        Between steps. CapacityError if it does not fit there; nothing has changed then.
        """
        device = self._cache.empty.device
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        buffer = self._buffer(layer)
        self._cache.move_down(layer, tier)
        self._buffers[layer] = buffer

    def restore(self, layer: int) -> None:
        """Moves an offloaded layer of the cache back, in the place of its buffers.

        Between steps. CapacityError if there is no memory for it; it stays below then.
        """
        self._drain()
        self._done.clear()  # of a step that came to no end
        self._cuts += self._buffers.pop(layer).cuts  # its memory is needed, its content is not
        try:
            self._cache.move_up(layer)
        except CapacityError:
            self._buffers[layer] = self._buffer(layer)
            raise

    def reset(self, row: int) -> None:
        """Forgets a sequence: another one has its row, or it has other tokens."""
        self._drain()
        for buffer in self._buffers.values():
            buffer.reset(row)

    def begin(
        self, rows: Tensor, page_table: Tensor, lengths: Tensor, *, recorded: bool = False
    ) -> None:
        """A step of sequences in `rows` (int64 [B]); the rest is as in `policy.Step`.

        recorded: whether what is launched is recorded, to be repeated.
        """
        self._drain()
        self._step, self._recorded = (rows, page_table, lengths), recorded
        self._frames.clear()
        self._done.clear()
        self._stall = 0.0

    def start(self, selection: Selection, layers: Iterable[int]) -> None:
        """Begins to load what is selected for these layers, in this order; others are ignored."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        frame = self._frame(selection.unit)
        for layer in layers:
            if layer in self._buffers:
                self._finish(layer)
                loaded = None if self._stream is None else torch.cuda.Event()
                result = self._submit(layer, selection, frame, ready, loaded)
                self._loads[layer] = _Load(selection, result, loaded)

    def wait(self, layer: int, selection: Selection) -> Resident:
        """The buffers of a layer with what is selected, but for the newest tokens."""
        begin = time.perf_counter()
        load = self._loads.get(layer)
        resident = self._finish(layer)
        if resident is None or load is None or load.selection is not selection:
            frame = self._frame(selection.unit)
            resident = self._exchange(layer, selection, frame)
            self._done.append((layer, resident))
        self._stall += time.perf_counter() - begin
        return resident

    def end(self) -> Loads:
        """What the step's sequences cost, for `count`; nobody waits for the device."""
        if self._recorded:
            for layer in list(self._loads):  # what was begun in a recording ends in it
                self._finish(layer)
        self._drain()
        assert self._step is not None, "begin comes first"
        lengths = self._step[2].long()
        counters = lengths.new_zeros(len(lengths), 3)
        kinds = {(r.selection.unit, self._buffers[i].token_bytes) for i, r in self._done}
        for unit, token_bytes in kinds:
            done = [
                r
                for i, r in self._done
                if (r.selection.unit, self._buffers[i].token_bytes) == (unit, token_bytes)
            ]
            # One column per layer and head.
            moved = torch.cat([r.moved for r in done], 1).long()
            counts = torch.cat([r.selection.counts for r in done], 1).long()
            # The newest token was neither here nor copied.
            read = (counts - 1) * unit + ((lengths - 1) % unit)[:, None]
            misses = moved.sum(1)
            counters += torch.stack([(read - moved).sum(1), misses, misses * token_bytes], 1)
        self._step = None
        self._done.clear()
        return Loads(counters, 0.0 if self._recorded else 1e3 * self._stall)

    def count(self, loads: Loads) -> list[Traffic]:
        """A step's sequences, each of which waited for all of them; waits for the device."""
        found = [
            Traffic(hits, misses, moved, loads.stall_ms)
            for hits, misses, moved in loads.counters.tolist()
        ]
        self.total += dataclasses.replace(sum(found, Traffic()), stall_ms=loads.stall_ms)
        return found

    def close(self) -> None:
        """Ends the thread."""
        self._drain()
        self._pool.shutdown()

    def _buffer(self, layer: int) -> ResidentBuffer:
        """Empty buffers, on the cache's device."""
        return ResidentBuffer(
            self._cache.geometry.layers[layer],
            self._cache.empty,
            page_size=self._cache.page_size,
            num_rows=self._num_rows,
            num_tokens=self._num_tokens,
            num_heads=self._num_heads,
        )

    def _frame(self, unit: int) -> Frame:
        """Computed once per step, for all layers."""
        assert self._step is not None, "begin comes first"
        if unit not in self._frames:
            self._frames[unit] = Frame.of(
                *self._step,
                num_tokens=self._num_tokens,
                page_size=self._cache.page_size,
                unit=unit,
            )
        return self._frames[unit]

    def _exchange(self, layer: int, selection: Selection, frame: Frame) -> Resident:
        pages = self._cache.keys[layer], self._cache.values[layer]
        return self._buffers[layer].load_missing(selection, frame, *pages)

    def _submit(
        self,
        layer: int,
        selection: Selection,
        frame: Frame,
        ready: torch.cuda.Event | None,
        loaded: torch.cuda.Event | None,
    ) -> Future[Resident]:
        if not self._recorded:
            return self._pool.submit(self._ahead, layer, selection, frame, ready, loaded)
        result: Future[Resident] = Future()
        result.set_result(self._ahead(layer, selection, frame, ready, loaded))
        return result

    def _ahead(
        self,
        layer: int,
        selection: Selection,
        frame: Frame,
        ready: torch.cuda.Event | None,
        loaded: torch.cuda.Event | None,
    ) -> Resident:
        """The other thread's work, if there is one."""
        if ready is None or loaded is None:
            return self._exchange(layer, selection, frame)
        with torch.cuda.stream(self._stream):
            ready.wait()
            resident = self._exchange(layer, selection, frame)
            loaded.record()
        return resident

    def _finish(self, layer: int) -> Resident | None:
        """The result of a load, which the computation may use from here on; None if none began."""
        load = self._loads.pop(layer, None)
        if load is None:
            return None
        resident = load.result.result()
        if load.loaded is not None:
            load.loaded.wait()
            for tensor in (resident.moved, resident.selection.indices, resident.selection.counts):
                tensor.record_stream(torch.cuda.current_stream())
        self._done.append((layer, resident))
        return resident

    def _drain(self) -> None:
        """Waits for what nobody has asked for; nobody wants to know if it failed, either."""
        for layer, load in list(self._loads.items()):
            # A recording that came to no end left nothing to wait for.
            if not self._recorded and load.result.exception() is None:
                self._finish(layer)
        self._loads.clear()

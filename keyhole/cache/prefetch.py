"""Elastic loading ahead of time: copies for later layers run while earlier ones compute.

SpeContext, section 5: with a selection known before layer 0, all offloaded layers load in order,
overlapped with the computation. A load that was not started ahead, because the policy selects in
the layer, or was started with another selection, runs in `wait`: prefetching never affects results.

A worker thread starts the copies. On a CPU it also performs them; on a GPU they run on their own
stream between two events: they begin after everything launched before `start`, so that the last
step's attention no longer reads the buffer, and attention waits for their end. A step under CUDA
graph capture uses no thread, whose launches would not be captured; stream and events are the same,
so that copies overlap with the computation on replay too.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.cache.pages import PageCache
from keyhole.cache.resident_buffer import Frame, Resident, ResidentBuffer
from keyhole.cache.tiers import Tier
from keyhole.errors import CapacityError
from keyhole.kernels import Selection
from keyhole.planner import buffer_tokens


@dataclass(frozen=True)
class Traffic:
    """Counters of elastic loading. Tokens count once per layer and KV head.

    hits: selected tokens found in the buffer. misses: tokens copied, moved_bytes in total.
    stall_ms: how long attention waited for copies.
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
        """Share of the selected tokens found in the buffer; None if nothing was selected."""
        selected = self.hits + self.misses
        return self.hits / selected if selected else None


class Loads(NamedTuple):
    """The counters of a step, still on the device.

    counters: int64 [B, 3], hits, misses and moved bytes of each sequence. stall_ms: as in
    `Traffic`; 0 for a replayed graph, where only the device waits.
    """

    counters: Tensor
    stall_ms: float = 0.0


@dataclass(frozen=True)
class _Load:
    """A copy in progress, and references to its tensors. loaded: its end event on a GPU."""

    selection: Selection
    result: Future[Resident]
    loaded: torch.cuda.Event | None


class Prefetcher:
    """The buffers of all offloaded layers of a cache.

    A step is `begin`, any number of `start`, a `wait` for each layer that attends to a selection,
    `end`. Called by one thread.

    num_rows: sequences that can run at once. token_budget: the most tokens of a selection.
    num_heads: see `ResidentBuffer`. total: the traffic of all counted steps.
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
        self._cuts = 0  # of freed buffers
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
        """How often a buffer's slots changed; graphs captured before write to old slots."""
        return self._cuts + sum(buffer.cuts for buffer in self._buffers.values())

    def offload(self, layer: int, tier: Tier) -> None:
        """Offloads a layer of the cache, and allocates resident buffers for it.

        Call between steps. CapacityError, with nothing changed, if the tier has no space, torch's
        error if there is none for the buffers. These come after the move: they take a part of the
        memory that the layer leaves, which the plan does not count twice.
        """
        device = self._cache.empty.device
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._cache.offload_layer(layer, tier)
        try:
            self._buffers[layer] = self._buffer(layer)
        except (RuntimeError, MemoryError):
            self._cache.make_resident(layer)
            raise

    def restore(self, layer: int) -> None:
        """Makes an offloaded layer resident again, and frees its buffers.

        Call between steps. CapacityError if there is no memory for it; it then stays offloaded.
        """
        self._drain()
        self._done.clear()  # of a step that did not finish
        self._cuts += self._buffers.pop(layer).cuts  # frees its memory; its contents are copies
        try:
            self._cache.make_resident(layer)
        except CapacityError:
            self._buffers[layer] = self._buffer(layer)
            raise

    def reset(self, row: int) -> None:
        """Drops a row's entries: another sequence has the row, or the sequence has other tokens."""
        self._drain()
        for buffer in self._buffers.values():
            buffer.reset(row)

    def begin(
        self, rows: Tensor, page_table: Tensor, lengths: Tensor, *, recorded: bool = False
    ) -> None:
        """A step of sequences in `rows` (int64 [B]); the rest is as in `Step`.

        recorded: whether the step is captured in a CUDA graph.
        """
        self._drain()
        self._step, self._recorded = (rows, page_table, lengths), recorded
        self._frames.clear()
        self._done.clear()
        self._stall = 0.0

    def start(self, selection: Selection, layers: Iterable[int]) -> None:
        """Starts loading the selection of these layers, in this order; skips resident layers."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        frame = self._frame(selection.unit)
        for layer in layers:
            if layer in self._buffers:
                self._finish(layer)
                loaded = None if self._stream is None else torch.cuda.Event()
                job = functools.partial(self._ahead, layer, selection, frame, ready, loaded)
                self._loads[layer] = _Load(selection, self._submit(job), loaded)

    def wait(self, layer: int, selection: Selection) -> Resident:
        """The buffers of a layer with its selected tokens, except the newest ones."""
        begin = time.perf_counter()
        load = self._loads.get(layer)
        resident = self._finish(layer)
        if resident is None or load is None or load.selection is not selection:
            frame = self._frame(selection.unit)
            resident = self._load_missing(layer, selection, frame)
            self._done.append((layer, resident))
        self._stall += time.perf_counter() - begin
        return resident

    def end(self) -> Loads:
        """The step's counters, for `count`; without a device sync."""
        if self._recorded:
            for layer in list(self._loads):  # a load begun during capture must end in it
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
            # The newest token is neither a hit nor a copy.
            read = (counts - 1) * unit + ((lengths - 1) % unit)[:, None]
            misses = moved.sum(1)
            counters += torch.stack([(read - moved).sum(1), misses, misses * token_bytes], 1)
        self._step = None
        self._done.clear()
        return Loads(counters, 0.0 if self._recorded else 1e3 * self._stall)

    def count(self, loads: Loads) -> list[Traffic]:
        """Adds a step's counters per sequence, each with the whole stall; syncs with the device."""
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
            self._cache.empty_rows,
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

    def _load_missing(self, layer: int, selection: Selection, frame: Frame) -> Resident:
        pages = self._cache.scattered(layer)
        return self._buffers[layer].load_missing(selection, frame, *pages)

    def _submit(self, job: Callable[[], Resident]) -> Future[Resident]:
        if not self._recorded:
            return self._pool.submit(job)
        result: Future[Resident] = Future()
        result.set_result(job())
        return result

    def _ahead(
        self,
        layer: int,
        selection: Selection,
        frame: Frame,
        ready: torch.cuda.Event | None,
        loaded: torch.cuda.Event | None,
    ) -> Resident:
        """The worker thread's job, if there is a thread."""
        if ready is None or loaded is None:
            return self._load_missing(layer, selection, frame)
        with torch.cuda.stream(self._stream):
            ready.wait()
            resident = self._load_missing(layer, selection, frame)
            loaded.record()
        return resident

    def _finish(self, layer: int) -> Resident | None:
        """The result of a load, which the computation may use from now on; None: none started."""
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
        """Waits for loads that no layer waited for, and ignores their errors."""
        for layer, load in list(self._loads.items()):
            # An aborted capture leaves nothing to wait for.
            if not self._recorded and load.result.exception() is None:
                self._finish(layer)
        self._loads.clear()

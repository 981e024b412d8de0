"""Elastic loading ahead of time: copies for later layers run while earlier ones compute.

SpeContext, section 5: a selection that is known before layer 0 lets all layers on the lower tier be
loaded in their order, beside the computation. What is not started ahead, since a policy chooses in
the layer, or is started with another selection, is loaded when it is waited for: starting is never
needed for a right result.

One thread starts the copies. On a CPU it makes them, too; on a GPU they run on a stream of their
own, between two events: they begin when all that was launched before `start` is done, so the last
step's attention no longer reads the buffer, and attention begins when they are done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.cache.elastic import ElasticBuffer, Frame, Resident
from keyhole.cache.pages import PageCache
from keyhole.cache.tiers import Tier
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


@dataclass(frozen=True)
class _Load:
    """A copy under way, and what keeps its tensors alive. loaded: its end on a GPU."""

    selection: Selection
    result: Future[Resident]
    loaded: torch.cuda.Event | None


class Prefetcher:
    """The buffers of all layers of a cache that are on the lower tier.

    A step is `begin`, any number of `start`, a `wait` for each layer that attends to a selection,
    `end`. Called by one thread.

    num_rows: sequences that can run at once. token_budget: most tokens of a selection. num_heads:
    see `ElasticBuffer`. total: the traffic of all steps.
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
        self._buffers: dict[int, ElasticBuffer] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keyhole-prefetch")
        self._stream: torch.cuda.Stream | None = None
        self._step: tuple[Tensor, Tensor, Tensor] | None = None
        self._frames: dict[int, Frame] = {}
        self._loads: dict[int, _Load] = {}
        self._done: list[tuple[int, Resident]] = []
        self._stall = 0.0
        self.total = Traffic()

    def __contains__(self, layer: int) -> bool:
        return layer in self._buffers

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have buffers, in order."""
        return tuple(sorted(self._buffers))

    def offload(self, layer: int, tier: Tier) -> None:
        """Moves a layer of the cache to the lower tier, and gives it buffers where it was.

        Between steps. CapacityError if it does not fit there; nothing has changed then.
        """
        upper = self._cache.keys[layer]
        if upper.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(upper.device)
        buffer = ElasticBuffer(
            self._cache.geometry.layers[layer],
            upper.new_empty(0),
            page_size=self._cache.page_size,
            num_rows=self._num_rows,
            num_tokens=self._num_tokens,
            num_heads=self._num_heads,
        )
        del upper
        self._cache.move_down(layer, tier)
        self._buffers[layer] = buffer

    def reset(self, row: int) -> None:
        """Forgets a sequence: another one has its row, or it has other tokens."""
        self._drain()
        for buffer in self._buffers.values():
            buffer.reset(row)

    def begin(self, rows: Tensor, page_table: Tensor, lengths: Tensor) -> None:
        """A step of sequences in `rows` (int64 [B]); the rest is as in `policy.Step`."""
        self._drain()
        self._step = rows, page_table, lengths
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
                result = self._pool.submit(self._ahead, layer, selection, frame, ready, loaded)
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

    def end(self) -> list[Traffic]:
        """What the step's sequences cost; each waited for all of them."""
        self._drain()
        assert self._step is not None, "begin comes first"
        lengths = self._step[2].cpu().long()
        counters = torch.zeros(3, len(lengths), dtype=torch.int64)
        for unit in {resident.selection.unit for _, resident in self._done}:
            done = [(i, r) for i, r in self._done if r.selection.unit == unit]
            # One column per layer and head.
            moved = torch.cat([r.moved for _, r in done], 1).cpu().long()
            counts = torch.cat([r.selection.counts for _, r in done], 1).cpu().long()
            # The newest token was neither here nor copied.
            read = (counts - 1) * unit + ((lengths - 1) % unit)[:, None]
            sizes = [self._buffers[i].token_bytes for i, r in done for _ in range(r.moved.shape[1])]
            counters[0] += (read - moved).sum(1)
            counters[1] += moved.sum(1)
            counters[2] += moved @ torch.tensor(sizes)
        self._step = None
        self._done.clear()
        stall = 1e3 * self._stall
        rows = torch.cat([counters.sum(1, keepdim=True), counters], 1).T.tolist()
        total, *found = (Traffic(hits, misses, moved, stall) for hits, misses, moved in rows)
        self.total += total
        return found

    def close(self) -> None:
        """Ends the thread."""
        self._drain()
        self._pool.shutdown()

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
        return self._buffers[layer].exchange(selection, frame, *pages)

    def _ahead(
        self,
        layer: int,
        selection: Selection,
        frame: Frame,
        ready: torch.cuda.Event | None,
        loaded: torch.cuda.Event | None,
    ) -> Resident:
        """The other thread's work."""
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
            if load.result.exception() is None:
                self._finish(layer)
        self._loads.clear()

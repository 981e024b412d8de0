"""What decode steps read: how much, for the statistics, and which tokens, if a request asks for it.

`SamplingParams(trace=True)` gives a sequence a `ReadTrace`. The runner fills it after each step,
from the selections that attention used. Only requests with `trace` are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.kept_tokens import RetainedPages
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.cache.packing import Packing
from keyhole.models.batch import Batch, Chunk, ScatteredChunk
from keyhole.policies.base import Policy, Selection, Step

#: Ranges that one request may keep; 12 MB. The trace of a request that needs more ends there.
MOST_RANGES = 2**20


@dataclass(frozen=True, eq=False)
class Read:
    """A Selection on the host: indices int [B, H, n] of the text, -1 is padding.

    H is 1, the KV heads, or the lists of `Policy.selection_heads`.
    """

    indices: np.ndarray
    unit: int

    def tokens(self, row: int, length: int) -> np.ndarray:
        """Which tokens of sequence `row` were read, bool [H, length]."""
        indices = self.indices[row]
        seen = np.zeros((len(indices), -(-length // self.unit)), bool)
        for head, chosen in zip(seen, indices, strict=True):
            head[chosen[chosen >= 0]] = True
        return seen.repeat(self.unit, axis=1)[:, :length]


def read_of(selection: Selection | None, left: RetainedPages | None, page_size: int) -> Read | None:
    """The positions that a layer read; None: all of them.

    selection: restricted to what the layer has. left: the pages that a policy has not evicted.
    """
    if selection is None:
        return None if left is None else Read(left.entries[:, None], page_size)
    indices = selection.indices.cpu().numpy()
    if left is not None:
        indices = _placed(indices, left.entries, page_size // selection.unit)
    return Read(indices, selection.unit)


def _placed(indices: np.ndarray, entries: np.ndarray, per_page: int) -> np.ndarray:
    """Positions in the sequence of indices [B, H, n] that count only the retained pages.

    entries: int64 [B, W], those pages. per_page: how many indices a page has.
    """
    pages = np.take_along_axis(entries[:, None], np.maximum(indices, 0) // per_page, 2)
    return np.where(indices < 0, -1, pages * per_page + indices % per_page)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenReads:
    """What was read by the step that computed a generated token.

    length: tokens of the sequence, the newest one included. layers: for each layer the index in
    `ranges` of what it read; layers that read the same share an entry. ranges: int32 [n, 3] each,
    ascending and without overlap: first token, end, and how many of the entry's `lists` have these
    tokens. lists: 1 if all heads read the same, else the number of KV heads, or of query heads
    where each of them has its own.
    """

    length: int
    layers: tuple[int, ...]
    ranges: tuple[np.ndarray, ...]
    lists: tuple[int, ...]

    def shares(self, layer: int) -> np.ndarray:
        """Share of the layer's heads that read each token, float64 [length]."""
        entry = self.layers[layer]
        found = np.zeros(self.length)
        for start, end, count in self.ranges[entry]:
            found[start:end] = count / self.lists[entry]
        return found


@dataclass(eq=False)
class ReadTrace:
    """The reads of a sequence, one for each generated token, until it has MOST_RANGES ranges.

    prompt_tokens: tokens before the first generated one. packing: the places of its documents'
    tokens, if these are not at their positions.
    """

    prompt_tokens: int
    packing: Packing | None = None
    tokens: list[TokenReads] = field(default_factory=list)
    _left: int = field(init=False, default_factory=lambda: MOST_RANGES)

    def add(self, reads: TokenReads) -> None:
        """Adds the reads of the next token; ignores those of a token that is computed again."""
        if reads.length - self.prompt_tokens != len(self.tokens):
            return
        self._left -= sum(map(len, reads.ranges))
        if self._left >= 0:
            self.tokens.append(reads)


def trace_decodes(traces: ListOf[ReadTrace | None], batch: Batch, geometry: Geometry) -> None:
    """Adds to the traces of decoding sequences what each layer of this step read for them."""
    step = batch.step
    assert step is not None
    found: dict[int, Read | None] = {}
    for row, trace in enumerate(traces):
        if trace is None:
            continue
        length = int(step.sequences.host_lengths[row])
        made = _Distinct(length, trace.packing)
        for layer, selection in zip(geometry.layers, batch.reads, strict=True):
            if selection is None and layer.window is not None:
                made.add(("window", layer.window), partial(_recent, length, layer))
                continue
            key = id(selection)  # layers that share a selection share its copy
            if key not in found:
                left = step.retained if layer.window is None else None
                found[key] = read_of(selection, left, step.page_size)
            made.add(key, partial(_tokens, found[key], row, length))
        trace.add(made.reads())


def trace_prompt(
    trace: ReadTrace, chunk: Chunk | ScatteredChunk, length: int, batch: Batch
) -> None:
    """Adds what the last prompt token read, from which the first token is generated."""
    geometry = batch.cache.geometry
    made = _Distinct(length, trace.packing)
    for index, layer in enumerate(geometry.layers):
        tokens = _recent(length, layer)
        if isinstance(chunk, ScatteredChunk):
            seen = np.zeros_like(tokens)
            seen[0, chunk.seen[index].cpu().numpy()] = True
            tokens &= seen
        chosen = batch.last_reads.get((chunk.rows.start, index))
        if chosen is not None:
            tokens = Read(chosen.indices.cpu().numpy(), chosen.unit).tokens(0, length)
        made.add(index, partial(np.asarray, tokens))
    trace.add(made.reads())


def _tokens(read: Read | None, row: int, length: int) -> np.ndarray:
    return np.ones((1, length), bool) if read is None else read.tokens(row, length)


def _recent(length: int, layer: LayerLayout) -> np.ndarray:
    """All tokens, or those in the window of a layer that has one: bool [1, length]."""
    tokens = np.ones((1, length), bool)
    if layer.window is not None:
        tokens[:, : max(0, length - layer.window)] = False
    return tokens


def _unpacked(packing: Packing, layer: int, places: Callable[[], np.ndarray]) -> np.ndarray:
    return packing.at_positions(layer, places())


class _Distinct:
    """Collects the positions that layers read; equal sets are stored once."""

    def __init__(self, length: int, packing: Packing | None) -> None:
        self._length = length
        self._packing = packing
        self._known: dict[object, int] = {}
        self._layers: list[int] = []
        self._ranges: list[np.ndarray] = []
        self._lists: list[int] = []

    def add(self, key: object, tokens: Callable[[], np.ndarray]) -> None:
        """Adds the next layer; tokens: returns bool [H, length], equal for equal keys."""
        if self._packing is not None:  # layers have different tokens at the same places
            layer = len(self._layers)
            key, places = (key, layer), tokens
            tokens = partial(_unpacked, self._packing, layer, places)
        if key not in self._known:
            self._known[key] = self._entry(tokens())
        self._layers.append(self._known[key])

    def _entry(self, tokens: np.ndarray) -> int:
        ranges = _ranges(tokens)
        content = (len(tokens), ranges.tobytes())
        if content not in self._known:
            self._known[content] = len(self._ranges)
            self._ranges.append(ranges)
            self._lists.append(len(tokens))
        return self._known[content]

    def reads(self) -> TokenReads:
        """The reads of all layers that were added."""
        return TokenReads(
            length=self._length,
            layers=tuple(self._layers),
            ranges=tuple(self._ranges),
            lists=tuple(self._lists),
        )


def _ranges(tokens: np.ndarray) -> np.ndarray:
    """Runs of tokens that are in equally many lists, at least one: int32 [n, 3]."""
    count = tokens.sum(0)
    edges = np.flatnonzero(np.diff(count, prepend=-1, append=-1))
    found = np.stack([edges[:-1], edges[1:], count[edges[:-1]]], 1).astype(np.int32)
    return found[found[:, 2] > 0]


def counted(
    reads: list[Selection | None], step: Step, geometry: Geometry, policy: Policy
) -> Tensor:
    """Float64 [B, 3]: attended fraction, bytes of keys and values, other bytes. No host sync.

    reads: what each layer read.
    """
    fraction, kv_bytes = attended(reads, step, geometry)
    other = policy.overhead_bytes(geometry, step)
    other = torch.zeros_like(kv_bytes) if other is None else other.double()
    return torch.stack([fraction, kv_bytes, other], 1)


def attended(
    reads: list[Selection | None], step: Step, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Attended fraction (mean over layers) and bytes of keys and values, float64 [B] each.

    Bytes are those of a kernel that reads every list by itself: where each query head has a list of
    its own, a token in the lists of two heads of a group counts twice.
    """
    length = step.lengths.double()  # also of what was evicted
    # Layers that share a selection or a window share the count: how many, and bytes of a token.
    alike: dict[object, tuple[Selection | None, int | None, int, int]] = {}
    for layer, selection in zip(geometry.layers, reads, strict=True):
        key = layer.window if selection is None else id(selection)
        # There may be a list for each query head.
        lists = 1 if selection is None else selection.indices.shape[1]
        token_bytes = max(layer.num_kv_heads, lists) * layer.numbers_per_head * geometry.kv_itemsize
        *_, number, so_far = alike.get(key, (None, None, 0, 0))
        alike[key] = selection, layer.window, number + 1, so_far + token_bytes
    read, kv_bytes = torch.zeros_like(length), torch.zeros_like(length)
    for selection, window, number, token_bytes in alike.values():
        tokens = _tokens_read(selection, window, step)
        read.add_(tokens, alpha=number)
        kv_bytes.add_(tokens, alpha=token_bytes)
    return read / (length * len(reads)), kv_bytes


def _tokens_read(selection: Selection | None, window: int | None, step: Step) -> Tensor:
    """Tokens read per KV head, float64 [B], mean over the heads."""
    if selection is None:
        whole = step.retained or step
        read = whole.lengths if window is None else step.lengths.clamp(max=window)
        return read.double()
    counts = selection.counts.double()
    counts = counts.mean(1) if counts.shape[1] > 1 else counts[:, 0]
    # All pages are full but the newest, which is always selected.
    missing = step.pages * step.page_size - step.lengths if selection.unit > 1 else 0
    return counts * selection.unit - missing

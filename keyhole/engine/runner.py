"""Runs one planned step: packs the tokens in a row, calls the model, counts what was read."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.layout import Geometry
from keyhole.cache.pages import PageCache
from keyhole.cache.prefetch import Prefetcher, Traffic
from keyhole.cache.remaining import Remaining
from keyhole.cache.thinned import Rows, Thinned
from keyhole.engine.eviction import Eviction
from keyhole.engine.lookahead import Lookahead
from keyhole.engine.page_table import PageTable
from keyhole.engine.scheduler import Plan
from keyhole.engine.sequence import Sequence
from keyhole.engine.state import SequenceState
from keyhole.models.batch import Batch, Chunk, ScatteredChunk
from keyhole.models.loading import Model
from keyhole.models.positions import Turns, rotates
from keyhole.policy.base import Policy, Selection, Step


class Runner:
    """The model with its cache and policy."""

    def __init__(
        self,
        model: Model,
        cache: PageCache,
        policy: Policy,
        max_batch: int,
        lookahead: Lookahead | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._policy = policy
        self._lookahead = lookahead
        self._prefetcher = prefetcher
        self._table = PageTable(max_batch)
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        self._state = SequenceState(policy, cache.geometry, max_batch, like)
        self._thinned = Thinned(len(cache.keys), max_batch, model.device)
        # Whose kept tokens stand in a row of it.
        self._kept: list[Tensor | None] = [None] * max_batch
        self._keeps_data = any(cache.data)
        self._traffic: list[Traffic] = []
        evicts = policy.most_pages(np.ones(1, np.int64), cache.page_size) is not None
        self._eviction = Eviction(policy, cache, max_batch) if evicts else None
        # Of the last step: which page each sequence gives up, who is due, and who they are.
        self._victims: tuple[Tensor, np.ndarray, list[Sequence]] | None = None

    @property
    def traffic(self) -> list[Traffic]:
        """What the last step's decoding sequences loaded; empty where no layer is below."""
        return self._traffic

    def run(self, plan: Plan) -> tuple[list[Sequence], Tensor, Tensor]:
        """One step. Returns the sequences whose logits are wanted, these logits, and reads.

        Logits [R, vocabulary]; reads float64 [B, 3], for each decoding sequence the attended
        fraction (mean over layers), bytes of keys and values, and other bytes. Advances
        `num_computed`.
        """
        spans = [(s, s.num_computed, s.num_computed + 1) for s in plan.decodes]
        spans += [(s, s.num_computed, s.num_computed + count) for s, count in plan.chunks]
        tokens = _join(np.asarray(s.tokens[start:end]) for s, start, end in spans)
        positions = _join(np.arange(start, end) for _, start, end in spans)
        ends = np.cumsum([end - start for _, start, end in spans])
        wanted = [i for i, (s, _, end) in enumerate(spans) if s.wants_logits(end)]
        row = (self._send(tokens), self._send(positions))
        batch = self.begin(plan, *row)
        logits = self._model.forward(*row, batch, self._send(ends[wanted] - 1))
        reads = self.end(plan, *row, batch)
        return [spans[i][0] for i in wanted], logits, reads

    def begin(self, plan: Plan, token_ids: Tensor, positions: Tensor) -> Batch:
        """What attention needs for one step, with the policy's choice before it under way.

        token_ids, positions: int64 [T], the packed row. Their forward comes next, then `end`.
        """
        self.evict()  # if whoever ran the last step was interrupted before
        batch = self._batch(plan)
        if batch.step is not None:
            if self._lookahead is not None:
                self._lookahead.before(token_ids, positions, batch)
            self._policy.before_step(batch.step)
            batch.prefetch(-1)
        return batch

    def end(self, plan: Plan, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """After the forward: advances `num_computed`; returns the reads, as `run`."""
        if self._lookahead is not None:
            self._lookahead.after(token_ids, positions, batch)
        loading = batch.step is not None and self._prefetcher is not None
        self._traffic = self._prefetcher.end() if loading and self._prefetcher else []
        if batch.step is not None:
            victims, left = self._policy.after_step(batch.step), batch.step.remaining
            if victims is not None and left is not None:
                self._victims = victims, left.due, plan.decodes
        for sequence in plan.decodes:
            sequence.num_computed += 1
        for sequence, count in plan.chunks:
            sequence.num_computed += count
        return self._reads(batch)

    def evict(self) -> None:
        """Frees the pages that the policy gives up, once the host has waited for the step anyway.

        A sequence that ended meanwhile has none.
        """
        if self._victims is None or self._eviction is None:
            return
        (victims, due, decodes), self._victims = self._victims, None
        rows = [i for i in np.flatnonzero(due) if decodes[i].slot >= 0]
        if rows:
            some = victims.cpu().numpy()[rows]
            for sequence, entry in self._eviction.evict([decodes[i] for i in rows], some):
                self._table.forget(sequence, entry)

    def kept(self, sequence: Sequence) -> Tensor | None:
        """What each layer has of a sequence's tokens so far, as `Sequence.kept`."""
        return sequence.kept if self._eviction is None else self._eviction.kept(sequence)

    def _batch(self, plan: Plan) -> Batch:
        size = self._cache.page_size
        position = np.asarray([s.num_computed for s in plan.decodes], np.int64)
        width = int(position.max()) // size + 1 if plan.decodes else 0
        table = self._table.rows(plan.decodes, width)
        page = table[np.arange(len(position)), position // size]
        slots, touched, filled = [page * size + position % size], [page], [position % size + 1]
        chunks: list[Chunk | ScatteredChunk] = []
        row = len(position)
        for sequence, count in plan.chunks:
            start, end = sequence.num_computed, sequence.num_computed + count
            pages = self._table.rows([sequence], -(-end // size))[0]
            place = np.arange(start, end)
            slots.append(pages[place // size] * size + place % size)
            entries = np.arange(start // size, len(pages))
            touched.append(pages[entries])
            filled.append(np.minimum(end - entries * size, size))
            rows, listed = slice(row, row + count), self._send(_join([pages]))
            if sequence.kept is None:
                known = int(sequence.repeated == start)
                chunks.append(Chunk(rows, start, listed, known))
            else:
                chunks.append(self._scattered(sequence.kept, rows, place, listed))
            row += count
        keep = self._keeps_data
        written = _join(slots)
        last = np.append(written[1:] != written[:-1] + 1, True) | (written % size == size - 1)
        return Batch(
            cache=self._cache,
            policy=self._policy,
            slots=self._send(written),
            newest=self._send(np.flatnonzero(last)),
            num_decode=len(position),
            step=self._step(plan.decodes, position, table) if plan.decodes else None,
            chunks=chunks,
            touched=self._send(_join(touched)) if keep else None,
            filled=self._send(_join(filled)) if keep else None,
            prefetcher=self._prefetcher,
        )

    def _scattered(
        self, kept: Tensor, rows: slice, positions: np.ndarray, table: Tensor
    ) -> ScatteredChunk:
        """Prompt tokens after documents of which layers dropped some."""
        after = np.arange(kept.shape[1], positions[-1] + 1)
        seen = [np.concatenate([np.flatnonzero(layer), after]) for layer in kept.numpy()]
        return ScatteredChunk(
            rows=rows,
            positions=self._send(positions),
            pages=table,
            seen=[self._send(_join([row])) for row in seen],
            start=int(positions[0]),
        )

    def _there(self, decodes: list[Sequence], lengths: np.ndarray) -> Rows | None:
        """What each layer has of the decoding sequences; None: everything."""
        for sequence in decodes:
            if self._kept[sequence.slot] is not sequence.kept:
                self._kept[sequence.slot] = sequence.kept
                if sequence.kept is None:
                    self._thinned.clear(sequence.slot)
                else:
                    self._thinned.set(sequence.slot, sequence.kept)
        if all(sequence.kept is None for sequence in decodes):
            return None
        slots = [sequence.slot for sequence in decodes]
        return self._thinned.rows(slots, lengths.tolist(), self._model.device)

    def _step(self, decodes: list[Sequence], position: np.ndarray, table: np.ndarray) -> Step:
        fresh, prompts = self._state.enter(decodes)
        step = self._make_step(decodes, position, table, fresh, prompts)
        if self._prefetcher is not None:
            for sequence, new in zip(decodes, fresh.tolist(), strict=True):
                if new:
                    self._prefetcher.reset(sequence.slot)
            self._prefetcher.begin(step.slots, step.page_table, step.lengths)
        return step

    def _make_step(
        self,
        decodes: list[Sequence],
        position: np.ndarray,
        table: np.ndarray,
        fresh: np.ndarray,
        prompts: np.ndarray,
    ) -> Step:
        size = self._cache.page_size
        remaining = None
        if self._eviction is not None:
            remaining = self._remaining(self._eviction, decodes, position, table, fresh)
        return Step(
            lengths=self._send((position + 1).astype(np.int32)),
            pages=self._send((position // size + 1).astype(np.int32)),
            max_length=int(position.max()) + 1,
            page_table=self._send(table),
            page_size=size,
            page_data=self._cache.data,
            host_lengths=position + 1,
            fresh=fresh,
            prompts=self._send(prompts.astype(np.int32)),
            host_prompts=prompts,
            keys=self._cache.keys,
            turn=self._turn,
            slots=self._send(np.asarray([s.slot for s in decodes], np.int64)),
            state=self._state.tensors,
            thinned=self._there(decodes, position + 1),
            remaining=remaining,
        )

    def _remaining(
        self,
        eviction: Eviction,
        decodes: list[Sequence],
        position: np.ndarray,
        table: np.ndarray,
        fresh: np.ndarray,
    ) -> Remaining:
        size = self._cache.page_size
        entries, pages, pinned, due = eviction.view(decodes, position, fresh)
        left = np.take_along_axis(table, np.maximum(entries, 0), 1)
        lengths = pages * size - (size - 1 - position % size)
        return Remaining(
            page_table=self._send(np.where(entries < 0, 0, left)),
            pages=self._send(pages.astype(np.int32)),
            lengths=self._send(lengths.astype(np.int32)),
            pinned=self._send(pinned),
            entries=entries,
            most_generated=int((pages - pinned).max()),
            due=due,
            thinned=self._there(decodes, lengths),
        )

    @functools.cached_property
    def _turns(self) -> Turns | None:
        """The rotations of the model; None if its positions are none."""
        return Turns.of(self._model) if rotates(self._model) else None

    def _turn(self, layer: int, x: Tensor, by: Tensor) -> Tensor:
        return x if self._turns is None else self._turns.turn(layer, x, by)

    def _reads(self, batch: Batch) -> Tensor:
        step, geometry = batch.step, self._cache.geometry
        if step is None:
            return torch.zeros(0, 3, dtype=torch.float64)
        fraction, kv_bytes = _attended(batch.reads, step, geometry)
        other = self._policy.overhead_bytes(geometry, step)
        other = torch.zeros_like(kv_bytes) if other is None else other.double()
        return torch.stack([fraction, kv_bytes, other], 1)

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.device)


def _attended(
    reads: list[Selection | None], step: Step, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Attended fraction (mean over layers) and bytes of keys and values, float64 [B] each."""
    length = step.lengths.double()  # also of what was evicted
    tokens: dict[object, Tensor] = {}
    fraction, kv_bytes = torch.zeros_like(length), torch.zeros_like(length)
    for layer, selection in zip(geometry.layers, reads, strict=True):
        # Layers that share a selection or a window share the count.
        key = layer.window if selection is None else id(selection)
        if key not in tokens:
            tokens[key] = _tokens(selection, layer.window, step)
        fraction += tokens[key] / length
        # With MLA every head may read latents of its own choice.
        lists = 1 if selection is None else selection.indices.shape[1]
        heads = max(layer.num_kv_heads, lists)
        kv_bytes += tokens[key] * (heads * layer.numbers_per_head * geometry.itemsize)
    return fraction / len(reads), kv_bytes


def _tokens(selection: Selection | None, window: int | None, step: Step) -> Tensor:
    """Tokens read per KV head, float64 [B], mean over the heads."""
    if selection is None:
        whole = step.remaining or step
        read = whole.lengths if window is None else step.lengths.clamp(max=window)
        return read.double()
    counts = selection.counts.double().mean(1)
    # All pages are full but the newest, which is always selected.
    missing = step.pages * step.page_size - step.lengths if selection.unit > 1 else 0
    return counts * selection.unit - missing


def _join(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate(list(parts)).astype(np.int64)

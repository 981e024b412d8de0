"""Runs one planned step: packs the tokens in a row, calls the model, counts what was read."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.pages import PageCache
from keyhole.cache.prefetch import Loads, Prefetcher, Traffic
from keyhole.cache.recurrent_state import RecurrentState, RecurrentStep
from keyhole.engine.cuda_graph_runner import CudaGraphRunner, Outputs, Recorder
from keyhole.engine.decode_inputs import (
    DecodeInputs,
    Eviction,
    InputsAhead,
    KeptTokens,
    PageTable,
    SequenceState,
    inputs_ahead,
    inputs_of,
)
from keyhole.engine.head_runner import HeadRunner
from keyhole.engine.read_trace import counted, trace_decodes, trace_prompt
from keyhole.engine.scheduling.scheduler_output import SchedulerOutput
from keyhole.engine.sequence import Sequence
from keyhole.kernels import Rotation
from keyhole.models.batch import Batch, Chunk, ScatteredChunk
from keyhole.models.model import Model
from keyhole.models.modules.sequence_adapters import adapter_rows
from keyhole.models.modules.sequence_rope import rope_rows
from keyhole.models.positions import RopeShift, rotates
from keyhole.policies.base import CachedLayers, Policy, SequenceRows, Step
from keyhole.policies.prefill.base import PrefillPolicy
from keyhole.retrieval.gate import SeerGate


class Runner:
    """The model with its cache and policy.

    keeper: the policy whose `on_append` sees written pages; None: `policy`.
    recorder: captures decode steps for replay; None: operations are launched one by one.
    recurrent: the state of the engine's sequences; None for a model without recurrent layers.
    num_draft_tokens: the most proposed tokens of a sequence in a step. prefill: what the tokens of
    prompts read; None: everything. gate: for a policy that wants one.
    """

    def __init__(
        self,
        model: Model,
        cache: PageCache,
        policy: Policy,
        max_batch: int,
        head_runner: HeadRunner | None = None,
        prefetcher: Prefetcher | None = None,
        recorder: Recorder | None = None,
        keeper: Policy | None = None,
        recurrent: RecurrentState | None = None,
        *,
        num_draft_tokens: int = 0,
        prefill: PrefillPolicy | None = None,
        gate: SeerGate | None = None,
    ) -> None:
        self._model, self._prefill, self._gate = model, prefill, gate
        self._cache, self._recurrent = cache, recurrent
        self._policy, self._keeper = policy, keeper
        if policy.shifts_keys:
            _ = self._rope_shift  # refuses a model whose keys cannot be shifted
        self._head_runner, self._prefetcher = head_runner, prefetcher
        self._table = PageTable(max_batch)
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        # The last row is for padding rows of a captured step.
        num_rows = max_batch if recorder is None else max_batch + 1
        self._state = SequenceState(policy, cache.geometry, num_rows, like)
        self._kept_tokens = KeptTokens(policy, len(cache.keys), max_batch, model.device)
        self._keeps_data = any(cache.data)
        self._loads: Loads | None = None  # of the last step, until they are counted
        evicts = policy.page_limit(np.ones(1, np.int64), cache.page_size) is not None
        self._eviction = Eviction(policy, cache, max_batch) if evicts else None
        self._recorded: CudaGraphRunner | None = None
        if recorder is not None:
            self._recorded = CudaGraphRunner(
                recorder,
                cache,
                policy,
                max_batch,
                max_batch * (1 + num_draft_tokens),
                model.device,
                make_step=self._step,
                work=self._decode,
                moves=lambda: cache.moves + (0 if prefetcher is None else prefetcher.moves),
            )
        # Of a step with proposed tokens: its recurrent states, and what each sequence had computed.
        self._unverified: tuple[RecurrentStep, list[tuple[Sequence, int]]] | None = None
        # Of the next step, if its rows are those of the last one.
        self._ahead: InputsAhead | None = None

    def traffic(self) -> list[Traffic]:
        """Returns once what the last step's decoding sequences loaded; waits for the device.

        Empty if no layer is offloaded.
        """
        loads, self._loads = self._loads, None
        return [] if loads is None or self._prefetcher is None else self._prefetcher.count(loads)

    @property
    def replayed(self) -> int:
        """The number of steps replayed as CUDA graphs."""
        return 0 if self._recorded is None else self._recorded.replayed

    def run(self, plan: SchedulerOutput) -> tuple[list[Sequence], Tensor, Tensor]:
        """One step. Returns the sequences that need logits, these logits, and what was read.

        Logits [R, vocabulary]; a sequence with proposed tokens is listed once for each of its rows.
        reads float64 [B, 3], for each of `plan.rows` the attended fraction (mean over layers),
        bytes of keys and values, and other bytes. Advances `num_computed` by one token of each
        decoding sequence, whether or not proposed ones follow.
        """
        self.evict()  # if the last step was interrupted before it
        inputs, rows = self._inputs(plan), plan.rows
        decoded = _join(
            np.asarray([s.tokens[s.num_computed], *plan.drafts.get(s, ())]) for s in plan.decodes
        )
        # The rows of proposed tokens follow a row whose logits are wanted.
        wanted = [i for i, s in enumerate(rows) if s.wants_logits(s.num_computed + 1)]
        if inputs is not None and self._recorded is not None and self._is_plain(plan):
            outputs = self._recorded.run(inputs, decoded)
            if outputs is not None:
                return self._finished(plan, inputs, outputs, wanted)
        spans = [(s, s.num_computed, s.num_computed + count) for s, count in plan.chunks]
        tokens = _join([decoded, *(np.asarray(s.tokens[start:end]) for s, start, end in spans)])
        starts = [] if inputs is None else [inputs.position]
        positions = _join([*starts, *(np.arange(start, end) for _, start, end in spans)])
        ends = len(rows) + np.cumsum([end - start for _, start, end in spans], dtype=np.int64)
        last = [i for i, (s, _, end) in enumerate(spans) if s.wants_logits(end)]
        row = (self._send(tokens), self._send(positions))
        batch = self._batch(plan, inputs)
        self._before(*row, batch)
        places = self._send(_join([np.asarray(wanted), ends[last] - 1]))
        logits = self._model.forward(*row, batch, places)
        reads = self.end(plan, *row, batch)
        return [rows[i] for i in wanted] + [spans[i][0] for i in last], logits, reads

    def begin(self, plan: SchedulerOutput, token_ids: Tensor, positions: Tensor) -> Batch:
        """Prepares the batch of a step, and starts what the policy selects before the first layer.

        token_ids, positions: int64 [T], the packed row. The caller then runs the forward pass, and
        calls `end`.
        """
        self.evict()
        batch = self._batch(plan, self._inputs(plan))
        self._before(token_ids, positions, batch)
        return batch

    def end(
        self, plan: SchedulerOutput, token_ids: Tensor, positions: Tensor, batch: Batch
    ) -> Tensor:
        """Ends a step after its forward pass: advances `num_computed`; returns reads, as `run`."""
        victims, reads = self._after(token_ids, positions, batch)
        loading = batch.step is not None and self._prefetcher is not None
        self._loads = self._prefetcher.end() if loading and self._prefetcher else None
        if victims is not None and self._eviction and batch.step and batch.step.retained:
            self._eviction.later(victims, batch.step.retained.due, plan.decodes)
        self._trace(plan, batch)
        self._count_blocks(plan, batch)
        if batch.recurrent is not None:
            batch.recurrent.commit()
        for sequence in plan.decodes:
            sequence.num_computed += 1
        for sequence, count in plan.chunks:
            sequence.num_computed += count
        self._unverified = None  # of a step that failed before its tokens were taken
        if batch.recurrent is not None and plan.drafts:
            self._unverified = batch.recurrent, [(s, s.num_computed) for s in plan.decodes]
        return reads

    def accept(self) -> None:
        """Keeps the recurrent states after the accepted tokens; called once these are known.

        A sequence has accepted as many tokens as its `num_computed` has advanced since `run`.
        """
        if self._unverified is not None:
            (step, before), self._unverified = self._unverified, None
            step.accept(np.asarray([s.num_computed - count for s, count in before], np.int64))

    def _trace(self, plan: SchedulerOutput, batch: Batch) -> None:
        """Records the reads of those sequences that are traced."""
        traces = [sequence.trace for sequence in plan.rows]
        if any(trace is not None for trace in traces):
            trace_decodes(traces, batch, self._cache.geometry)
        for (sequence, count), chunk in zip(plan.chunks, batch.chunks, strict=True):
            end = sequence.num_computed + count
            if sequence.trace is not None and end == len(sequence.tokens):
                trace_prompt(sequence.trace, chunk, end, batch)

    def _count_blocks(self, plan: SchedulerOutput, batch: Batch) -> None:
        """Adds what prompts read under a prefill policy; no host sync."""
        if self._prefill is None:
            return
        geometry = self._cache.geometry
        lists = sum(geometry.layers[i].num_query_heads for i in geometry.full_attention)
        for (sequence, count), chunk in zip(plan.chunks, batch.chunks, strict=True):
            if isinstance(chunk, Chunk) and not chunk.dense:
                before = lists * self._prefill.causal_blocks(chunk.start, count)
                sequence.blocks_read += batch.blocks_read.get(chunk.rows.start, before)
                sequence.blocks_before += before

    def renumber(self) -> None:
        """Adapts to renumbered pages (`PageCache.pack`). Call between steps."""
        self._table.renumber()
        self._ahead = None

    def copy_rows(self, other: Runner, pairs: Iterable[tuple[Sequence, Sequence]]) -> None:
        """Continues sequences of another runner of the same size that has no step in progress.

        pairs: its sequence and ours, which has the same slot and its own pages.
        """
        self._state.copy(other._state, pairs)
        if self._eviction is not None and other._eviction is not None:
            self._eviction.copy(other._eviction)

    def cut(self, sequence: Sequence) -> None:
        """Adapts to pages removed from the end of a sequence's list. Call between steps."""
        self._table.cut(sequence)
        self._ahead = None

    def evict(self) -> None:
        """Frees the pages that the policy evicts; the host has synced already, for the tokens."""
        if self._eviction is not None:
            for sequence, entry in self._eviction.evict():
                self._table.forget(sequence, entry)

    def kept(self, sequence: Sequence) -> Tensor | None:
        """The tokens of a sequence that each layer still has, as `Sequence.kept`."""
        return sequence.kept if self._eviction is None else self._eviction.kept(sequence)

    def _inputs(self, plan: SchedulerOutput) -> DecodeInputs | None:
        if not plan.decodes:
            return None
        rows = plan.rows
        ahead, self._ahead = self._ahead, None
        size, parts = self._cache.page_size, (self._table, self._state, self._eviction)
        inputs = ahead.inputs if ahead and ahead.is_of(rows) else inputs_of(rows, size, *parts)
        if self._prefetcher is not None:
            for sequence, new in zip(rows, inputs.fresh.tolist(), strict=True):
                if new:
                    self._prefetcher.reset(sequence.slot)
        if self._head_runner is not None:
            self._head_runner.check(int(inputs.position.max()) + 1)
        return inputs

    def _before(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> None:
        """Lets the policy select before the first layer, and starts the loads."""
        if batch.step is None:
            return
        if self._head_runner is not None:
            self._head_runner.before(token_ids, positions, batch)
        self._policy.before_step(batch.step)
        batch.prefetch(-1)

    def _after(
        self, token_ids: Tensor, positions: Tensor, batch: Batch
    ) -> tuple[Tensor | None, Tensor]:
        """Calls the hooks after the last layer; returns the pages to evict, and the reads."""
        if self._head_runner is not None:
            self._head_runner.after(token_ids, positions, batch)
        if batch.step is None:
            return None, torch.zeros(0, 3, dtype=torch.float64)
        victims = self._policy.after_step(batch.step)
        return victims, counted(batch.reads, batch.step, self._cache.geometry, self._policy)

    def _is_plain(self, plan: SchedulerOutput) -> bool:
        """Whether a step only decodes, over all tokens and untraced, so that it can be replayed."""
        offloaded = self._cache.offloaded_layers
        if plan.chunks or (offloaded and (self._prefetcher is None or self._policy.reads_keys)):
            return False
        return all(s.kept is None and s.trace is None and s.is_base for s in plan.decodes)

    @torch.no_grad()
    def _decode(self, tensors: Mapping[str, Tensor], step: Step) -> Outputs:
        """Runs a plain step (`_is_plain`) whose inputs and outputs are on the device."""
        row = tensors["token_ids"], tensors["positions"]
        every = torch.arange(len(row[0]), device=self._model.device)
        keep = self._keeps_data
        batch = Batch(
            cache=self._cache,
            policy=self._policy,
            slots=tensors["slots"],
            newest=every,
            num_decode=len(every),
            step=replace(step),  # what hooks leave in it ends with it
            chunks=[],
            touched=tensors["touched"] if keep else None,
            filled=tensors["filled"] if keep else None,
            prefetcher=self._prefetcher,
            keeper=self._keeper,
        )
        if self._prefetcher is not None:
            self._prefetcher.begin(
                step.sequences.slots, step.page_table, step.lengths, recorded=True
            )
        self._before(*row, batch)
        logits = self._model.forward(*row, batch, every)
        victims, reads = self._after(*row, batch)
        loads = None if self._prefetcher is None else self._prefetcher.end().counters
        return Outputs(logits, reads, victims, loads)

    def _finished(
        self, plan: SchedulerOutput, inputs: DecodeInputs, outputs: Outputs, wanted: list[int]
    ) -> tuple[list[Sequence], Tensor, Tensor]:
        """Returns the results of `run` after a replayed step, and updates the host's state."""
        rows, count = plan.rows, len(plan.rows)
        self._loads = None if outputs.loads is None else Loads(outputs.loads[:count])
        if outputs.victims is not None and self._eviction and inputs.due is not None:
            self._eviction.later(outputs.victims[:count], inputs.due, plan.decodes)
        for sequence in plan.decodes:
            sequence.num_computed += 1
        # Not where pages are evicted, which is known after the step.
        if self._recorded is not None and self._eviction is None and not plan.drafts:
            self._ahead = inputs_ahead(rows, self._cache.page_size, self._table, self._state)
            self._recorded.look_ahead(self._ahead)
        logits = outputs.logits[:count]
        if len(wanted) < count:
            logits = logits[self._send(np.asarray(wanted, np.int64))]
        return [rows[i] for i in wanted], logits, outputs.reads[:count]

    def _batch(self, plan: SchedulerOutput, inputs: DecodeInputs | None) -> Batch:
        size, rows_of = self._cache.page_size, plan.rows
        row = len(rows_of)
        slots, touched, filled = [], [], []
        if inputs is not None:
            slots.append(inputs.written["slots"])
            touched.append(inputs.written["touched"])
            filled.append(inputs.written["filled"])
        chunks: list[Chunk | ScatteredChunk] = []
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
                known_from = known, sequence.first, sequence.slot
                asks = sequence.context is not None  # a question over stored documents
                chunks.append(Chunk(rows, start, listed, *known_from, dense=asks))
            else:
                where = rows, start, listed, sequence.first, sequence.slot
                chunks.append(ScatteredChunk.after(sequence.kept, *where))
            row += count
        counts = [*((s, 1) for s in rows_of), *plan.chunks]
        lengths = [(s.rope_length, count) for s, count in counts]
        adapters = [(s.adapter, count) for s, count in counts]
        keep = self._keeps_data
        written = _join(slots)
        last = np.append(written[1:] != written[:-1] + 1, True) | (written % size == size - 1)
        return Batch(
            cache=self._cache,
            policy=self._policy,
            slots=self._send(written),
            newest=self._send(np.flatnonzero(last)),
            num_decode=len(rows_of),
            step=None if inputs is None else self._entered(rows_of, inputs),
            chunks=chunks,
            touched=self._send(_join(touched)) if keep else None,
            filled=self._send(_join(filled)) if keep else None,
            prefetcher=self._prefetcher,
            keeper=self._keeper,
            recurrent=self._recurrent_step(plan),
            state=self._state.tensors,
            rope=() if self._model.rope is None else rope_rows(lengths, self._model.device),
            adapters=adapter_rows(adapters, self._model.device),
            prefill=self._prefill,
        )

    def _recurrent_step(self, plan: SchedulerOutput) -> RecurrentStep | None:
        """The recurrent states of the step's sequences, in the order of the packed row."""
        if self._recurrent is None:
            return None
        decoding = [(s.slot, 1 + len(plan.drafts.get(s, ()))) for s in plan.decodes]
        prompts = [(s.slot, count, s.num_computed == 0) for s, count in plan.chunks]
        return RecurrentStep.of(self._recurrent, decoding, prompts, self._model.device)

    def _entered(self, rows: list[Sequence], inputs: DecodeInputs) -> Step:
        """The step of these sequences, with their documents and offloaded layers."""
        step = self._step(inputs, {name: self._send(x) for name, x in inputs.sent.items()})
        step.kept_tokens = self._kept_tokens.rows(rows, inputs.position + 1)
        if step.retained is not None:
            there = self._kept_tokens.rows(rows, inputs.sent["left_lengths"])
            step.retained = replace(step.retained, kept_tokens=there)
        if self._prefetcher is not None:
            self._prefetcher.begin(step.sequences.slots, step.page_table, step.lengths)
        return step

    def _step(self, inputs: DecodeInputs, tensors: Mapping[str, Tensor]) -> Step:
        """The step of these inputs; tensors: those of them that are on the device."""
        return Step(
            lengths=tensors["lengths"],
            pages=tensors["pages"],
            max_length=int(inputs.position.max()) + 1,
            page_table=tensors["page_table"],
            page_size=self._cache.page_size,
            sequences=SequenceRows(
                host_lengths=inputs.position + 1,
                fresh=inputs.fresh,
                prompts=tensors["prompts"],
                host_prompts=inputs.prompts,
                slots=tensors["state_rows"],
                host_slots=inputs.sent["state_rows"],
                state=self._state.tensors,
            ),
            cache=CachedLayers(self._cache.keys, self._cache.data, self._rotation),
            retained=inputs.retained(tensors),
            gate=self._gate,
        )

    @functools.cached_property
    def _rope_shift(self) -> RopeShift | None:
        """The rotations of the model; None if its positions are not rotations."""
        if not rotates(self._model):
            return None
        return RopeShift.of(self._model, f"policy {self._policy.name!r}")

    def _rotation(self, layer: int) -> Rotation:
        if self._rope_shift is None:
            return Rotation(None)
        return Rotation(self._rope_shift.frequencies[layer], self._rope_shift.rotated_last[layer])

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.device)


def _join(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

"""The two forward hooks of a `sparse` block: they pack a batch before and unpack it after."""

from __future__ import annotations

import inspect
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from keyhole.cache.argument import CACHE_NAMES, cache_argument, cache_field
from keyhole.cache.pages import PageCache
from keyhole.config import EngineConfig
from keyhole.engine.allocation import allocate
from keyhole.engine.head_runner import HeadRunner, load_gate, load_head
from keyhole.engine.model_runner import Runner
from keyhole.engine.scheduling.scheduler_output import SchedulerOutput
from keyhole.engine.sequence import Counters, Sequence
from keyhole.errors import PromptTooLongError, RequestError
from keyhole.hf.paged_cache import (
    OPTIONS,
    PagedCache,
    columns,
    free,
    full,
    present,
    spread,
    unsupported,
)
from keyhole.models.attention import NAME
from keyhole.models.batch import Batch, PassThrough
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from keyhole.policies.spe_context import choice_lists

#: How often a thread that waits looks whether the thread that holds the lock has ended.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class SparseStats:
    """The cost of all calls inside a `sparse` block. None: no decode step ran.

    prompt_tokens: computed exactly. decoded_tokens: computed under the policy, rows that wait for
    longer ones included. step_ms: median of the decode steps. The others as in `Stats`.
    """

    prompt_tokens: int
    decoded_tokens: int
    step_ms: float | None
    attended_fraction: float | None
    kv_bytes_read: int
    other_bytes_read: int


@dataclass
class SparseRun:
    """The value of `with sparse(...)`: the policy with every "auto" resolved, and its counters."""

    policy: Policy
    counters: Counters = field(default_factory=Counters)
    prompt_tokens: int = 0
    step_ms: list[float] = field(default_factory=list)

    @property
    def stats(self) -> SparseStats:
        """The counters so far."""
        steps = self.counters.steps
        return SparseStats(
            prompt_tokens=self.prompt_tokens,
            decoded_tokens=steps,
            step_ms=statistics.median(self.step_ms) if steps else None,
            attended_fraction=self.counters.attended_fraction / steps if steps else None,
            kv_bytes_read=round(self.counters.kv_bytes),
            other_bytes_read=round(self.counters.other_bytes),
        )


@dataclass
class _Call:
    """A forward pass in progress, and where its results go.

    token_ids, positions: int64 [T], the packed row. wanted: int64 [B, n], the places in it whose
    logits are requested, -1 for padding. packed: int64 [T], b * Q + place of each token.
    """

    cache: PagedCache
    plan: SchedulerOutput
    token_ids: Tensor
    positions: Tensor
    wanted: np.ndarray
    packed: Tensor
    shape: tuple[int, int]
    returns_cache: bool
    returns_tuple: bool
    batch: Batch
    begin: float = field(default_factory=time.perf_counter)


class Hooks:
    """The hooks of one block and their shared state: pages, policy and a lock."""

    def __init__(self, model: Model, policy: Policy, config: EngineConfig) -> None:
        geometry = model.geometry(config.page_size)
        self.run = SparseRun(policy.resolve(geometry))
        self._model = model
        self._head = load_head(self.run.policy, model) if self.run.policy.wants_head else None
        self._gate = load_gate(self.run.policy, model, geometry)
        self.pages: PageCache
        self.pages, _ = allocate(
            model,
            geometry,
            self.run.policy,
            config,
            self._head,
            num_rows=config.max_batch,
            gate=self._gate,
        )
        self._head_runner = None
        if self._head is not None:
            self._head_runner = HeadRunner(self._head, self.pages, choice_lists(geometry))
        self._names = list(inspect.signature(model.network.forward).parameters)
        self._handles: list[Any] = []
        self._replaced: weakref.WeakSet[Any] = weakref.WeakSet()
        # One thread at a time (a streamer may have its own). A thread whose forward pass was
        # interrupted, so that the second hook never ran, still holds the lock until it runs another
        # or ends.
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._dropped: deque[list[Sequence]] = deque()

    def attach(self) -> None:
        """Registers the hooks."""
        network = self._model.network
        if self._head is not None:
            self._model.watch(self._head.config.feature_layers)
        self._handles = [
            network.register_forward_pre_hook(self._before, with_kwargs=True),
            network.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def detach(self) -> None:
        """Removes the hooks."""
        self._model.unwatch()
        for handle in self._handles:
            handle.remove()

    def _runner(self, num_rows: int) -> Runner:
        """The runner for this number of rows."""
        place = (self._model, self.pages, self.run.policy, num_rows)
        return Runner(*place, self._head_runner, gate=self._gate)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until no other thread runs a forward pass."""
        self._take_turn()
        try:
            free(self.pages, self._dropped)
            yield
        finally:
            self._lock.release()

    def _drop(self, rows: list[Sequence]) -> None:
        """Frees the pages of a cache that is gone: now, or before the next forward pass while one
        runs.

        It never waits: garbage is collected in any thread, and in the middle of an allocation.
        """
        self._dropped.append(rows)
        if self._lock.acquire(blocking=False):
            try:
                free(self.pages, self._dropped)
            finally:
                self._lock.release()

    @contextmanager
    def _turn_to_copy(self) -> Iterator[None]:
        """As `turn`; a copy within a forward pass is a part of it."""
        if threading.get_ident() in self._calls:
            yield
        else:
            with self.turn():
                yield

    def _take_turn(self) -> None:
        if self._calls.pop(threading.get_ident(), None) is not None:
            return
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            for ended in self._calls.keys() - sys._current_frames().keys():
                if self._calls.pop(ended, None) is not None:
                    return

    def __reduce__(self) -> Any:
        """Refused: hooks are copied with their model."""
        raise unsupported("copying or pickling the model; do so outside the block")

    def _before(
        self, _: Any, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replaces the arguments of a forward pass by those of one packed row."""
        self._take_turn()
        try:
            free(self.pages, self._dropped)
            given = dict(zip(self._names, args, strict=False)) | named
            self._check(given)
            call, changed = self._pack(given)
        except BaseException:
            self._lock.release()
            raise
        self._calls[threading.get_ident()] = call
        return (), changed

    def _after(self, _: Any, __: Any, ___: Any, output: Any) -> Any:
        """Converts the output to the shape that transformers expects; None: the pass failed."""
        call = self._calls.pop(threading.get_ident(), None)
        if call is None:  # the first hook raised an error
            return None
        try:
            return None if output is None else self._unpack(call, output)
        finally:
            self._lock.release()

    def _check(self, given: dict[str, Any]) -> None:
        network = self._model.network
        for name, reason in OPTIONS.items():
            value = given.get(name)
            value = getattr(network.config, name, None) if value is None else value
            if value is not None and value is not False:
                raise unsupported(f"{name} ({reason})")
        if network.config._attn_implementation != NAME:
            raise unsupported("set_attn_implementation; call it before the block")
        if (network.dtype, network.device) != (self._model.dtype, self._model.device):
            raise unsupported(
                f"moving the model inside its block, from {self._model.dtype} on "
                f"{self._model.device} to {network.dtype} on {network.device}"
            )
        kind = self._model.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != network.dtype:
            raise unsupported(f"autocast of a {network.dtype} model; load it in another dtype")
        if network.training:
            raise unsupported("training mode; call model.eval() first")
        if torch.is_grad_enabled():
            raise unsupported("gradients; call the model under torch.no_grad()")
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        if (ids is None) == (embeds is None):
            raise RequestError("give either input_ids or inputs_embeds")
        if ids is None and self._head_runner is not None:
            raise unsupported(f"inputs_embeds with {self.run.policy.name} (its head reads tokens)")

    def _pack(self, given: dict[str, Any]) -> tuple[_Call, dict[str, Any]]:
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        source = ids if ids is not None else embeds
        assert source is not None
        B, Q = source.shape[:2]
        past = next((given[n] for n in CACHE_NAMES if given.get(n) is not None), None)
        cache = self._cache(past, B)
        there = present(given.get("attention_mask"), B, Q, cache)
        plan, order = self._plan(cache, there)
        packed_host = np.concatenate([b * Q + np.flatnonzero(there[b]) for b in order])
        packed = torch.from_numpy(packed_host).to(source.device)

        def pack(tensor: Tensor) -> Tensor:
            return tensor.expand(B, *tensor.shape[1:]).flatten(0, 1)[packed][None]

        places = given.get("position_ids")
        if places is None:
            start = cache.get_seq_length()
            places = torch.arange(start, start + Q, device=source.device)[None]
        positions = pack(places)
        tokens = torch.zeros_like(positions) if ids is None else pack(ids)
        place = np.full(B * Q, -1)
        place[packed_host] = np.arange(len(packed_host))
        wanted = place.reshape(B, Q)[:, columns(given.get("logits_to_keep", 0), Q)]
        use_cache, in_class = given.get("use_cache"), given.get("return_dict")
        config = self._model.network.config
        use_cache = getattr(config, "use_cache", True) if use_cache is None else use_cache
        call = _Call(
            cache=cache,
            plan=plan,
            token_ids=tokens[0],
            positions=positions[0],
            wanted=wanted,
            packed=packed,
            shape=(B, Q),
            returns_cache=past is not None or bool(use_cache),
            returns_tuple=not (
                getattr(config, "return_dict", True) if in_class is None else in_class
            ),
            batch=cache.runner.begin(plan, tokens[0], positions[0]),
        )
        replaced = ("attention_mask", "input_ids", *CACHE_NAMES)
        changed = {k: v for k, v in given.items() if k not in replaced}
        changed |= {
            "position_ids": positions,
            cache_argument(self._model.network): PassThrough(call.batch, positions[0]),
            "use_cache": False,
            "return_dict": True,
            "logits_to_keep": torch.from_numpy(wanted[wanted >= 0]).to(source.device),
            "keyhole": call.batch,
        }
        changed |= {"input_ids": tokens} if embeds is None else {"inputs_embeds": pack(embeds)}
        if given.get("token_type_ids") is not None:
            changed["token_type_ids"] = pack(given["token_type_ids"])
        return call, changed

    def _cache(self, past: Any, num_rows: int) -> PagedCache:
        """The cache of the rows; a new one where `generate` made an empty cache."""
        if isinstance(past, PagedCache):
            if past.pages is not self.pages:
                past.update()
            if len(past.rows) != num_rows:
                raise RequestError(
                    f"the cache has {len(past.rows)} rows, but the input has {num_rows}"
                )
            return past
        if past is None:
            return self._new_cache(num_rows)
        if type(past) is not DynamicCache or past.offloading:
            kind = "offloaded" if type(past) is DynamicCache else type(past).__name__
            raise unsupported(f"another cache ({kind}); leave cache_implementation out")
        own = getattr(past, "_is_user_defined", False) or past in self._replaced
        if own or past.get_seq_length():
            raise unsupported(
                "a DynamicCache of your own; pass the cache of an earlier output "
                "(from generate with return_dict_in_generate=True), or none"
            )
        self._replaced.add(past)
        return self._new_cache(num_rows)

    def _new_cache(self, num_rows: int) -> PagedCache:
        return PagedCache(
            self.pages,
            self._runner,
            num_rows,
            self.run.policy.shares_pages,
            self._turn_to_copy,
            self._drop,
        )

    def _plan(self, cache: PagedCache, there: np.ndarray) -> tuple[SchedulerOutput, list[int]]:
        """The step, with pages for all its tokens, and its rows in packed order."""
        plan = SchedulerOutput()
        decodes, chunks = [], []
        for b, count in enumerate(there.sum(1).tolist()):
            row = cache.rows[b]
            if not count:  # a chunk of padding only
                continue
            self._reserve(cache.runner, row, row.num_computed + count)
            if there.shape[1] == 1 and row.num_computed:
                plan.decodes.append(row)
                decodes.append(b)
            else:
                # A new array marks a new sequence, so that state of the row's earlier steps is
                # discarded.
                row.kept, row.pages = cache.runner.kept(row), row.pages[:]
                plan.chunks.append((row, count))
                chunks.append(b)
        if not decodes and not chunks:
            raise RequestError("the input is empty, or padding only")
        return plan, decodes + chunks

    def _reserve(self, runner: Runner, row: Sequence, length: int) -> None:
        """Allocates pages for `length` tokens; the first page that is written is not shared."""
        pages, size, limit = self.pages, self.pages.page_size, self._model.max_length
        if length > limit:
            raise PromptTooLongError(
                f"the input has {length} tokens, but this model takes at most {limit} "
                f"({self._model.length_reason})"
            )
        if row.num_computed % size:
            last = pages.writable(row.pages[-1])
            if last is None:
                raise full(pages)
            if last != row.pages[-1]:
                row.pages[-1] = last
                runner.renumber()
        fresh = pages.allocate(max(0, -(-length // size) - len(row.pages)))
        if fresh is None:
            raise full(pages)
        row.pages.extend(fresh)

    def _unpack(self, call: _Call, output: Any) -> Any:
        cache, run, (B, Q) = call.cache, self.run, call.shape
        reads = cache.runner.end(call.plan, call.token_ids, call.positions, call.batch)
        cache.advance(Q)
        run.prompt_tokens += sum(count for _, count in call.plan.chunks)
        for row in reads.tolist():
            run.counters.add_step(*row)
        cache.runner.evict()
        if call.plan.decodes:
            run.step_ms.append(1e3 * (time.perf_counter() - call.begin))
        values = dict(output) | {"logits": spread(output.logits[0], call.wanted)}
        if "hidden_states" in values:
            values["hidden_states"] = tuple(
                hidden.new_zeros(B * Q, hidden.shape[-1])
                .index_copy(0, call.packed, hidden[0])
                .unflatten(0, (B, Q))
                for hidden in values["hidden_states"]
            )
        values[cache_field(output)] = cache if call.returns_cache else None
        result = type(output)(**values)
        return result.to_tuple() if call.returns_tuple else result

"""A policy that does what another one does and keeps what it saw and chose, for any policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyhole import LLM, Policy, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence as Request
from keyhole.eval.policy_trace import PolicyProxy
from keyhole.models.model import Model
from keyhole.policies.base import Selection, Step
from tests.oracle import Choose, KeysOf, SparseModel, Watch
from tests.policies.models import prompt

PAGE = 4
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Call:
    """One layer of one step: what it read, or that it scored (and read everything).

    left: per sequence the pages that are left, where the policy evicts; None: everything. pinned:
    how many of them the policy cannot evict.
    """

    layer: int
    lengths: list[int]
    selection: Selection | None
    scored: bool
    left: list[list[int]] | None = None
    pinned: list[int] | None = None

    @property
    def unit(self) -> int:
        """Tokens of an entry."""
        return PAGE if self.selection is None else self.selection.unit

    def entries(self, row: int) -> list[list[int]] | None:
        """The chosen entries of one sequence, per KV head; None is everything."""
        if self.selection is None:
            return None if self.left is None else [self.left[row]]
        counts = self.selection.counts[row].tolist()
        rows = self.selection.indices[row].tolist()
        return [indices[:count] for indices, count in zip(rows, counts, strict=True)]


@dataclass(frozen=True, eq=False)
class Recording(PolicyProxy):
    """`inner`, with `calls` beside it."""

    calls: list[Call] = field(default_factory=list)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> Selection | None:
        selection = self.inner.on_scores(layer, scores, step)
        scored = selection is None
        self.calls.append(Call(layer, step.lengths.tolist(), selection, scored, *left(step)))
        return selection

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        selection = self.inner.select(layer, query, step)
        self.calls.append(Call(layer, step.lengths.tolist(), selection, False, *left(step)))
        return selection


def left(step: Step) -> tuple[list[list[int]] | None, list[int] | None]:
    """Per sequence the pages that are left, where the policy evicts, and how many are pinned."""
    if step.retained is None:
        return None, None
    entries = step.retained.entries.tolist()
    pages = [[page for page in row if page >= 0] for row in entries]
    return pages, step.retained.pinned.tolist()


def make_engine(model: Model, policy: Policy, **settings: Any) -> Engine:
    """An engine with small pages; more settings as those of `LLM`."""
    return LLM(model, policy, **{"page_size": PAGE, "memory": "16MiB", **settings}).engine


def steps(engine: Engine) -> Iterator[None]:
    """Runs to the end; yields after every step, the cache's books checked."""
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        yield


def run(engine: Engine) -> None:
    for _ in steps(engine):
        pass


def forced(engine: Engine, prompt: Sequence[int], given: Sequence[int]) -> Request:
    """A request whose tokens after the prompt are given; all logits are kept."""
    return engine.add(prompt, GREEDY, given=given, keep_logits=True)


def forced_logits(
    model: Model, policy: Policy, prompt: Sequence[int], given: Sequence[int], **settings: Any
) -> Tensor:
    """Logits [len(given) + 1, vocabulary]: after the prompt and after each given token."""
    engine = make_engine(model, policy, **settings)
    request = forced(engine, prompt, given)
    run(engine)
    return torch.stack(request.logits)


def check_against(
    choose: Choose,
    model: Model,
    network: Any,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    count: int = 12,
    keys_of: KeysOf | None = None,
    watch: Watch | None = None,
    **settings: Any,
) -> int:
    """Decodes ragged prompts and compares every choice and all logits with the oracle's.

    network: the same weights in plain transformers. Lengths of prompts differ by more than `count`,
    so that a length says which request it is. Returns how many choices were not everything.
    """
    recording = Recording(inner=policy)
    engine = make_engine(model, recording, prefill_chunk=16, **settings)
    params = dataclasses.replace(GREEDY, max_tokens=count)
    requests = [engine.add(prompt, params, keep_logits=True) for prompt in prompts]
    run(engine)
    wanted: dict[tuple[int, int], Any] = {}
    for request in requests:
        oracle = SparseModel(network, choose, keys_of=keys_of, watch=watch)
        start = len(request.prompt)
        logits = oracle.logits(request.tokens[:-1], start)[start - 1 :]
        assert not wanted.keys() & oracle.choices.keys()
        wanted |= oracle.choices
        found = torch.stack(request.logits)
        assert (found - logits).abs().max() <= 1e-4 * max(1.0, logits.abs().max().item())
    seen: set[tuple[int, int]] = set()
    narrow = 0
    for call in recording.calls:
        for row, length in enumerate(call.lengths):
            assert (call.layer, length) not in seen
            seen.add((call.layer, length))
            choice = wanted[call.layer, length]
            entries = call.entries(row)
            if choice is None or entries is None:  # one of them may spell out everything
                _assert_everything(entries, length, call)
                _assert_tokens(choice, length)
            else:
                assert entries == choice[0], f"layer {call.layer}, {length} tokens"
                narrow += any(len(tokens) < length for tokens in choice[1])
    assert seen == wanted.keys()
    return narrow


def _assert_everything(entries: list[list[int]] | None, length: int, call: Call) -> None:
    if entries is not None:
        assert call.selection is not None
        everything = list(range(-(-length // call.selection.unit)))
        assert entries == [everything] * len(entries), f"layer {call.layer}, {length} tokens"


def _assert_tokens(choice: Any, length: int) -> None:
    if choice is not None:
        assert choice[1] == [list(range(length))] * len(choice[1])


def check_under_pressure(
    model: Model, policy: Policy, check: Callable[[Engine], None], tokens: int
) -> None:
    """Calls `check` after every step of requests that share pages, wait for memory and start anew.

    tokens: how many each generates.
    """
    probe = make_engine(model, policy)
    engine = make_engine(model, policy, memory=30 * probe.cache.page_bytes, prefill_chunk=7)
    params = dataclasses.replace(GREEDY, max_tokens=tokens)
    start = prompt(16)
    requests = [engine.add(start + prompt(n), params) for n in (9, 3, 13)]
    requests.append(engine.add(start, params))
    preempted = 0
    for _ in steps(engine):
        check(engine)
        preempted += any(request.generated for request in engine.scheduler.waiting)
    assert preempted
    assert max(request.stats().cached_prompt_tokens for request in requests) >= 15
    assert all(len(request.generated) == tokens for request in requests)


def check_offloaded(model: Model, policy: Policy, folder: Path) -> None:
    """Layers offloaded to `folder` change neither tokens nor logits."""
    params = dataclasses.replace(GREEDY, max_tokens=60)
    plain = make_engine(model, policy)
    memory = {"memory": 24 * plain.cache.page_bytes, "offload": folder}
    engine = make_engine(model, policy, max_batch=1, **memory)
    requests = [one.add(prompt(70), params, keep_logits=True) for one in (plain, engine)]
    run(plain)
    run(engine)
    assert requests[1].stats().offloaded_layers
    assert requests[0].generated == requests[1].generated
    assert (torch.stack(requests[0].logits) - torch.stack(requests[1].logits)).abs().max() <= 1e-5

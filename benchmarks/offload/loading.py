"""Engines that differ in where keys and values are stored and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from keyhole.bench.measure import Launches, Turn, checked, take_turns
from keyhole.bench.model import RandomKV
from keyhole.bench.settings import PAGE_SIZE, brings_budget
from keyhole.cache.prefetch import Prefetcher, Traffic
from keyhole.cache.resident_buffer import Resident
from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.kernels import Selection
from keyhole.models.model import Model
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from keyhole.retrieval.head import RetrievalHead

# A Chrome trace of some decode steps: what runs when, on every stream and thread.
#
# Open it in chrome://tracing or ui.perfetto.dev. On a GPU, copies for later layers are on a row of
# their own next to the kernels; on a CPU they run in another thread.


#: Steps in a trace.
STEPS = 4


def write(path: Path, step: Callable[[], object], device: torch.device) -> None:
    """Runs `step` STEPS times, and writes a trace of it."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    every = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every) as recorded:
        for i in range(STEPS):
            with record_function(f"step {i}"):
                step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(path))


@dataclass(eq=False)
class SelectionOverlap:
    """Counts over the selections of sequences, one after another.

    steps: those with a selection. selected, repeated: the selected entries, and those of them that
    the previous step had selected, too; tokens or pages, per layer and KV head. First steps, and
    steps after one that read everything, are not compared. Buffers repeat slightly more, because
    entries that a step did not select may remain for the next.
    """

    steps: int = 0
    selected: int = 0
    repeated: int = 0
    _step: int = 0
    _seen: int = -1
    _last: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    def begin(self) -> None:
        """Begins a step."""
        self._step += 1

    def forget(self) -> None:
        """Begins another sequence."""
        self._last.clear()

    def record(self, layer: int, selection: Selection) -> None:
        """Counts what a layer reads in this step."""
        self.steps += self._seen != self._step
        self._seen = self._step
        now = selection.indices[0]
        step, last = self._last.get(layer, (-1, now))
        if step == self._step - 1:
            self.selected += int(selection.counts.sum())
            self.repeated += sum(
                int(torch.isin(a[a >= 0], b).sum()) for a, b in zip(now, last, strict=True)
            )
        self._last[layer] = self._step, now.clone()


def recording(repeats: SelectionOverlap) -> type[Prefetcher]:
    """Elastic loading that reports every selection to `repeats`."""

    class Recording(Prefetcher):
        def begin(
            self, rows: Tensor, page_table: Tensor, lengths: Tensor, *, recorded: bool = False
        ) -> None:
            repeats.begin()
            super().begin(rows, page_table, lengths, recorded=recorded)

        def wait(self, layer: int, selection: Selection) -> Resident:
            repeats.record(layer, selection)
            return super().wait(layer, selection)

    return Recording


# More than any sequence needs: `Loading`, not the planner, decides which layers are offloaded.
_MEMORY = 1 << 40


class Waiting(Prefetcher):
    """Without overlap: nothing is loaded before the layer that needs it requests it."""

    def start(self, selection: Selection, layers: Iterable[int]) -> None:
        """Does nothing; `wait` loads everything."""


class Forgetful(Prefetcher):
    """Without elastic loading: the whole selection is copied at every step."""

    def begin(
        self, rows: Tensor, page_table: Tensor, lengths: Tensor, *, recorded: bool = False
    ) -> None:
        """Discards the contents of the buffers of these sequences."""
        super().begin(rows, page_table, lengths, recorded=recorded)
        for buffer in self._buffers.values():
            buffer.entries.index_fill_(0, rows, -1)


#: Untimed steps: the first one after a prompt loads everything, the others warm up.
WARM_UP = 4

#: The system with all layers resident, to which the other times are relative.
RESIDENT = "resident"
ELASTIC, NO_OVERLAP, NO_ELASTIC = "elastic", "elastic_without_overlap", "everything_copied"
#: How offloaded layers are loaded; None if none is offloaded.
SYSTEMS: Mapping[str, type[Prefetcher] | None] = {
    RESIDENT: None,
    ELASTIC: Prefetcher,
    NO_OVERLAP: Waiting,
    NO_ELASTIC: Forgetful,
}


def at_budgets(name: str, budgets: Several[int]) -> list[Policy]:
    """A policy under every budget, or only under its own if its name sets one."""
    if brings_budget(name):
        return [make_policy(name)]
    return [make_policy(name, {"token_budget": budget}) for budget in budgets]


def budget_of(policy: Policy) -> int:
    """The budget of a policy that selects."""
    return int(getattr(policy, "token_budget"))  # noqa: B009  (of most policies, not of their base)


@dataclass(frozen=True, kw_only=True)
class ForcedText:
    """A prompt, and the tokens after it that are decoded one by one."""

    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)

    def last(self, steps: int) -> ForcedText:
        """The same text split so that its last `steps` tokens are the answer."""
        tokens = [*self.prompt, *self.answer]
        return ForcedText(prompt=tokens[:-steps], answer=tokens[-steps:])


class Loading:
    """One engine with at most `requests` requests, for texts whose tokens are given.

    All layers that can be offloaded are offloaded from the first token on, or as many as necessary
    if `memory` limits the keys and values of resident layers; `kind` defines how they are loaded.
    None: all layers are resident. folder: of the files that a CPU offloads to. graphs: whether
    steps may be replayed as CUDA graphs, in which `kind` is not called.
    """

    def __init__(
        self,
        kind: type[Prefetcher] | None,
        model: Model,
        policy: Policy,
        head: RetrievalHead | None,
        folder: str,
        memory: int | None = None,
        *,
        requests: int = 1,
        graphs: bool = True,
    ) -> None:
        config = EngineConfig(max_batch=requests, page_size=PAGE_SIZE, graphs=graphs)
        if kind is not None:
            config = replace(config, memory=memory or _MEMORY, offload=folder)
        self.engine = Engine(model, policy, config, head=head if policy.wants_head else None)
        self._prefetcher: Prefetcher | None = None
        self._replayed = 0  # before the timed steps
        offloader = self.engine.offloader
        if kind is not None and offloader is not None:
            self._prefetcher = offloader.prefetcher
            # The engine itself has one way of loading; the others exist only for comparison.
            self._prefetcher.__class__ = kind
            if memory is None:
                offloader.offload_layer(len(offloader.plan.model.order))
            offloader.least = offloader.offloaded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()

    @property
    def offloaded_layers(self) -> int:
        """Number of offloaded layers."""
        return 0 if self.engine.offloader is None else self.engine.offloader.offloaded

    @property
    def traffic(self) -> Traffic | None:
        """The traffic of all steps so far; None if no layer is offloaded."""
        return None if self._prefetcher is None else self._prefetcher.total

    def fill(self, numbers: RandomKV, prompts: Several[list[int]]) -> None:
        """Writes the pages of prompts except their last tokens, and adds them to the prefix cache.

        numbers: of at least as many sequences, with `numbers.context` tokens each.
        """
        for sequence, prompt in enumerate(prompts):
            self._fill(numbers, sequence, prompt)
        # These pages will be read, so their layers must stay in place, although no request uses
        # them yet.
        if self.engine.offloader is not None:
            self.engine.offloader.least = self.engine.offloader.offloaded

    def _fill(self, numbers: RandomKV, sequence: int, prompt: list[int]) -> None:
        cache, policy, prefix = self.engine.cache, self.engine.policy, self.engine.prefix
        listed = cache.allocate(numbers.context // PAGE_SIZE)
        assert listed is not None
        assert prefix is not None
        pages = torch.tensor(listed, device=numbers.device)
        generator = torch.Generator().manual_seed(sequence)
        for tensor in cache.common.values():
            tensor[pages] = torch.randn(tensor[pages].shape, generator=generator).to(tensor)
        filled = torch.full_like(pages, PAGE_SIZE)
        for layer in range(numbers.num_layers):
            for stored, draw in ((cache.keys, numbers.keys), (cache.values, numbers.values)):
                tensor = stored[layer]  # on the host if the layer is offloaded from a GPU
                drawn = draw(layer, sequence).unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)
                tensor[pages.to(tensor.device)] = drawn.to(tensor.device)
            policy.on_append(cache.keys[layer], cache.data[layer], pages, filled)
        prefix.insert(prompt[:-1], listed, len(prompt))
        cache.release(listed)

    def start(self, *texts: ForcedText) -> None:
        """Computes the prompts; from then on, each step decodes a token of every answer."""
        sequences = [self._add(text, keep_logits=False) for text in texts]
        while not all(sequence.is_decoding for sequence in sequences):
            self.engine.step()
        self._replayed = self.engine.replayed_steps

    def launches(self, name: str) -> Launches:
        """How the steps after the prompt were launched: see `keyhole.bench.measure`."""
        return checked(name, self.engine, self._replayed, self.engine.model.device)

    def logits(self, text: ForcedText) -> Tensor:
        """Decodes the whole answer: logits before and after each of its tokens, [1 + n, V]."""
        sequence = self._add(text, keep_logits=True)
        while not sequence.is_finished:
            self.engine.step()
        return torch.stack(sequence.logits)

    def _add(self, text: ForcedText, *, keep_logits: bool) -> Sequence:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        return self.engine.add(text.prompt, params, given=text.answer, keep_logits=keep_logits)


def timed(
    systems: Mapping[str, Loading],
    repeat: int,
    device: torch.device,
    others: Mapping[str, Turn] | None = None,
) -> tuple[dict[str, list[float]], dict[str, Traffic | None]]:
    """Milliseconds of `repeat` interleaved steps of each system, and what these steps loaded.

    others: the turns of baselines.
    """
    turns = {name: Turn(call=system.engine.step) for name, system in systems.items()}
    turns |= others or {}
    take_turns(turns, WARM_UP, device)
    before = {name: system.traffic for name, system in systems.items()}
    times = take_turns(turns, repeat, device)
    loaded = {name: _since(before[name], system.traffic) for name, system in systems.items()}
    return times, loaded


def _since(before: Traffic | None, now: Traffic | None) -> Traffic | None:
    if before is None or now is None:
        return None
    return Traffic(
        now.hits - before.hits,
        now.misses - before.misses,
        now.moved_bytes - before.moved_bytes,
        now.stall_ms - before.stall_ms,
    )

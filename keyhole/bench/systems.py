"""The systems of the decode benchmark: Keyhole's engine, and baselines in transformers or other
programs.

The engines of all policies share one cache: its pages are filled once with random numbers, and
given to each engine as the cached prefix of a prompt. New tokens go to pages of each engine.

Baselines with the same kind of cache share one, too. `DynamicCache`, the default of transformers,
copies itself at every step; what a step has added is removed afterwards, so that every step has the
same context. `StaticCache` writes in place and reads its full capacity under a mask. torch's flash
attention over `in_place` keys and values is the fastest dense step without pages, and FlashInfer's
(`flashinfer_baseline`) the one with pages.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Collection
from collections.abc import Sequence as Several
from dataclasses import asdict, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from keyhole import kernels
from keyhole.bench import flashinfer_baseline, measure
from keyhole.bench.measure import THEIRS, Captured, Launches, launches
from keyhole.bench.model import (
    Need,
    RandomKV,
    Weights,
    head_data,
    num_pages,
    page_data,
    without_copying_weights,
)
from keyhole.bench.settings import ALL_BASELINES, PAGE_SIZE, brings_budget
from keyhole.cache.argument import cache_argument
from keyhole.cache.pages import PageCache
from keyhole.config import EngineConfig, SamplingParams, require
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.models.model import Model
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from keyhole.retrieval.head import RetrievalHead


class KeyholeSystem:
    """The engine of one policy over a shared cache. token_budget: None for the policy's default."""

    def __init__(
        self,
        name: str,
        model: Model,
        cache: PageCache,
        batch: int,
        head: RetrievalHead | None,
        token_budget: int | None = None,
    ) -> None:
        self.name = name
        kv_dtype = cache.geometry.kv_dtype
        config = EngineConfig(max_batch=batch, page_size=PAGE_SIZE, kv_dtype=kv_dtype)
        policy = _policy(name, token_budget)
        head = head if policy.wants_head else None
        self.engine = Engine(model, policy, config, cache, head)
        self.sequences: list[Sequence] = []
        self._replayed = 0  # before the steps that count

    def logits(self, prompts: list[list[int]], given: list[int]) -> Tensor:
        """Logits [B, 1 + len(given), vocabulary] after the prompts and after each given token."""
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        sequences = [
            self.engine.add(prompt, params, given=given, keep_logits=True) for prompt in prompts
        ]
        while self.engine.has_work:
            self.engine.step()
        return torch.stack([torch.stack(sequence.logits) for sequence in sequences])

    def start(self, prompts: list[list[int]], steps: int) -> None:
        """Adds requests that last for at least `steps` steps."""
        params = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
        self.sequences = [self.engine.add(prompt, params) for prompt in prompts]
        self._replayed = self.engine.replayed_steps

    def step(self) -> None:
        """One token for every request, scheduling and sampling included."""
        done = self.engine.step()
        assert len(done) == len(self.sequences)

    def rest(self) -> None:
        """Does nothing: the next step continues from this one."""

    def cost(self) -> dict[str, Any]:
        """What one step read, summed over the requests; the resolved policy; launches.

        NotRecordedError if its steps should have been replayed as CUDA graphs and were not.
        """
        stats = [sequence.stats() for sequence in self.sequences]
        steps = [len(sequence.step_ms) for sequence in self.sequences]
        fractions = [s.attended_fraction for s in stats if s.attended_fraction is not None]
        return {
            "policy": {"name": self.engine.policy.name} | asdict(self.engine.policy),
            "kv_bytes": sum(s.kv_bytes_read / n for s, n in zip(stats, steps, strict=True)),
            "other_bytes": sum(s.other_bytes_read / n for s, n in zip(stats, steps, strict=True)),
            "attended_fraction": statistics.mean(fractions),
            "launches": measure.checked(
                self.name, self.engine, self._replayed, self.engine.model.device
            ),
        }


class Pages:
    """The shared cache, and the pages in it that hold the prompts."""

    def __init__(
        self,
        model: Model,
        policies: Several[str],
        batch: int,
        context: int,
        steps: int,
        token_budget: int | None = None,
        kv_dtype: str = "auto",
    ) -> None:
        """steps: the most tokens that any engine adds to a prompt. token_budget: see
        `KeyholeSystem`.
        """
        geometry = model.geometry(PAGE_SIZE).stored_as(kv_dtype)
        self.cache = PageCache(
            geometry,
            num_pages(policies, batch, context, steps),
            dtype=model.dtype,
            device=model.device,
            page_data=page_data(model, policies),
            common=head_data(model, policies),
        )
        # Random weights have no trained head; the cost of a step is the same with a random one.
        head = RetrievalHead.random(model.network) if self.cache.common else None
        self.systems = [
            KeyholeSystem(name, model, self.cache, batch, head, token_budget) for name in policies
        ]
        pages = self.cache.allocate(batch * context // PAGE_SIZE)
        assert pages is not None
        self._pages = torch.tensor(pages, device=model.device)

    def fill(self, numbers: RandomKV) -> None:
        """Writes keys and values of all prompts, and the page data of the policies."""
        cache = self.cache
        for tensor in cache.common.values():
            tensor[self._pages] = torch.randn_like(tensor[self._pages])
        for sequence, pages in enumerate(self._pages.view(numbers.batch, -1)):
            filled = torch.full_like(pages, PAGE_SIZE)
            for layer in range(numbers.num_layers):
                for stored, draw in ((cache.keys, numbers.keys), (cache.values, numbers.values)):
                    tensor = draw(layer, sequence)
                    paged = tensor.unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)
                    pool = stored[layer]
                    pool[pages] = (
                        kernels.quantise(paged, pool.dtype) if kernels.is_quantised(pool) else paged
                    )
                for own in self.systems:
                    policy = own.engine.policy
                    policy.on_append(cache.keys[layer], cache.data[layer], pages, filled)

    def know(self, prompts: list[list[int]]) -> None:
        """Adds the pages to the engines' prefix caches, as prefixes of these prompts."""
        parts = self._pages.view(len(prompts), -1).tolist()
        for own in self.systems:
            assert own.engine.prefix is not None
            for prompt, pages in zip(prompts, parts, strict=True):
                own.engine.prefix.insert(prompt[:-1], pages, len(prompt))
        self.cache.release(self._pages.tolist())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the cache."""
        return self.cache.capacity * self.cache.page_bytes


def _policy(name: str, token_budget: int | None) -> Policy:
    """A policy, with this budget if it has one and its name does not set it."""
    policy = make_policy(name)
    has_budget = "token_budget" in {field.name for field in fields(policy)}
    if token_budget is None or not has_budget or brings_budget(name):
        return policy
    return make_policy(name, {"token_budget": token_budget})


class OutsideSystem(Protocol):
    """A system with its own cache. `step_ms`, `peak_bytes`: of its last step."""

    name: str
    step_ms: float
    peak_bytes: int

    def fill(self, numbers: RandomKV) -> None:
        """Fills its cache for all sequences."""
        ...

    def logits(self, prompts: list[list[int]], given: list[int]) -> Tensor:
        """See `KeyholeSystem.logits`."""
        ...

    def start(self, prompts: list[list[int]], steps: int) -> None:
        """Sets the first tokens of the next step."""
        ...

    def step(self) -> None:
        """One token for every sequence, greedy."""
        ...

    def settle(self) -> None:
        """Waits until its threads are idle."""
        ...

    def rest(self) -> None:
        """Removes what the steps have added."""
        ...

    def cost(self) -> dict[str, Any]:
        """What one step must read, and how much memory the process should use."""
        ...

    def close(self) -> None:
        """Ends the process."""
        ...


class Outside(Protocol):
    """Systems over the same weights in separate processes, measured one after another."""

    @property
    def names(self) -> Collection[str]:
        """Of the systems."""
        ...

    def write(self, weights: Weights) -> None:
        """Writes the weights for these systems, once."""
        ...

    def needed(self, model: Model, batch: int, context: int, steps: int) -> Need:
        """The memory of one of them, before it is started."""
        ...

    def start(self, name: str, model: Model, batch: int, context: int, steps: int) -> OutsideSystem:
        """Starts one. steps: the most tokens that are added to the context."""
        ...


# Contiguous keys and values in preallocated memory, written in place and never copied.
#
# torch's flash attention reads exactly the existing tokens. `StaticCache` of transformers reads its
# full capacity under a mask, which flash attention does not support.


class _Layer(DynamicLayer):  # type: ignore[misc] # transformers is not typed
    """A layer with capacity for `room` tokens."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the room, for keys and values [B, Hkv, T, D] like these."""
        super().lazy_initialization(key_states, value_states)
        like = (key_states, value_states)
        self._all = [x.new_empty(*x.shape[:2], self._room, x.shape[3]) for x in like]

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Appends new tokens; returns everything, as views."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        begin = self._length
        for room, new in zip(self._all, (keys, values), strict=True):
            room[:, :, begin : begin + new.shape[2]] = new
        return self._resized(keys.shape[2])

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens; as in transformers, their number is negative."""
        self._resized(tokens_to_remove)

    def _resized(self, by: int) -> tuple[Tensor, Tensor]:
        self._length += by
        keys, values = (room[:, :, : self._length] for room in self._all)
        self.keys, self.values = keys, values
        return keys, values


def in_place_cache(config: Any, room: int) -> DynamicCache:
    """An empty cache for this many tokens."""
    cache: Any = DynamicCache(config=config)
    cache.layers = [_Layer(room) for _ in range(config.num_hidden_layers)]
    return cache


def _flash(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token per sequence over everything: query [B, Hq, 1, D]."""
    assert query.shape[2] == 1, "decode steps only"
    assert mask is None, "none is registered under our name"
    # On a GPU, torch must not choose a slower implementation.
    only = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if query.is_cuda else contextlib.nullcontext()
    with only:
        out = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


# transformers tries to load a package for every name that contains "flash".
AttentionInterface.register("in_place", _flash)


class _Offloaded(DynamicCache):  # type: ignore[misc] # transformers is not typed
    """Keys and values on the host, copied one layer ahead; copies keep their order.

    Later versions of transformers ensure that. 5.17 begins a copy while its source is still being
    copied to the host, and into memory that the step is still reading.
    """

    def update(self, keys: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        self.prefetch_stream.wait_stream(torch.cuda.default_stream(keys.device))
        both: tuple[Tensor, Tensor] = super().update(keys, *rest, **more)
        return both


class BaselineCache:
    """A cache of transformers. steps: the most tokens that are added, for caches with a fixed
    capacity.

    ConfigError for a cache on the host without a GPU, for a dtype that flash attention does not
    support, and for one that FlashInfer reads where it is not installed.
    """

    def __init__(self, kind: str, model: Model, context: int, steps: int) -> None:
        self.static, self.in_place = kind == "static", kind in ("in_place", "in_pages")
        self.below = kind == "offloaded"
        config, room = model.network.config, context + steps
        self.cache: Any
        if self.static:
            self.cache = StaticCache(config=config, max_cache_len=room)
        elif self.in_place:
            wide = model.dtype == torch.float32 and model.device.type == "cuda"
            require(not wide, "dtype", "float32", "bfloat16 or float16 for flash attention on cuda")
            made = in_place_cache if kind == "in_place" else flashinfer_baseline.paged_cache
            self.cache = made(config, room)
        else:
            right = "cuda if keys and values are on the host"
            good = not self.below or model.device.type == "cuda"
            require(good, "device", str(model.device), right)
            cls = _Offloaded if self.below else DynamicCache
            self.cache = cls(config=config, offloading=self.below)

    def fill(self, numbers: RandomKV) -> None:
        """Stores keys and values of all prompts."""
        for layer in range(numbers.num_layers):
            keys, values = (
                torch.stack([draw(layer, sequence) for sequence in range(numbers.batch)])
                for draw in (numbers.keys, numbers.values)
            )
            self.cache.update(keys, values, layer)

    def take_back(self, tokens: int) -> None:
        """Removes the newest tokens if that does not slow down later steps.

        A static cache keeps them. On the host the remaining tokens would be in pieces that must be
        joined before each copy.
        """
        if not self.static and not self.below:
            self.cache.crop(-tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(2 * layer.keys.nbytes for layer in self.cache.layers)


class Baseline:
    """One attention implementation of transformers over a filled cache."""

    def __init__(self, name: str, weights: Weights, past: BaselineCache, context: int) -> None:
        self.name = name
        self._network = without_copying_weights(weights.transformers)
        self._network.set_attn_implementation(ALL_BASELINES[name][0])
        self._past = past
        self._token_bytes = weights.keyhole.geometry(PAGE_SIZE).token_bytes
        self._device = weights.keyhole.device
        self._context = context
        self._next = torch.empty(0)
        self._captured: Captured | None = None
        self._replayed = 0

    def logits(self, prompts: list[list[int]], given: list[int]) -> Tensor:
        """See `KeyholeSystem.logits`."""
        tokens = [[prompt[-1], *given] for prompt in prompts]
        rows = [self._forward(torch.tensor(column)) for column in zip(*tokens, strict=True)]
        self._past.take_back(len(rows))
        return torch.stack(rows, 1).float().cpu()

    def start(self, prompts: list[list[int]], steps: int) -> None:
        """Sets the first token of the next step."""
        self._next = torch.tensor([prompt[-1] for prompt in prompts], device=self._device)
        if self._past.in_place and self._device.type == "cuda":
            self._captured = Captured(self._same_step, self._next)

    def step(self) -> None:
        """One token for every sequence, greedy."""
        if self._captured is not None:
            self._next = self._captured(self._next)
            self._replayed += 1
        else:
            self._next = self._forward(self._next).argmax(-1)

    def rest(self) -> None:
        """Removes what the step has added."""
        if self._captured is None:
            self._past.take_back(1)

    def _same_step(self, tokens: Tensor) -> Tensor:
        """The next tokens [B]; always the same step, because what it added is removed."""
        best = self._forward(tokens).argmax(-1)
        self._past.take_back(1)
        return best

    def cost(self) -> dict[str, Any]:
        """What one step must read, without copies and the unused capacity of a static cache."""
        return {
            "policy": None,
            "kv_bytes": float(len(self._next) * (self._context + 1) * self._token_bytes),
            "other_bytes": 0.0,
            "attended_fraction": 1.0,
            "launches": self.launches,
        }

    @property
    def launches(self) -> Launches:
        """How its steps were launched: transformers itself launches operations one by one."""
        captured = self._captured is not None
        return launches(self._replayed, None if captured else THEIRS)

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self._device)[:, None]
        past = {cache_argument(self._network): self._past.cache}
        out = self._network(input_ids=tokens, **past, use_cache=True)
        logits: Tensor = out.logits[:, -1]
        return logits

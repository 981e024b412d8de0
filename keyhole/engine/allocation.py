"""Plans an engine's memory, allocates its cache, and offloads layers while sequences grow and end.

`keyhole plan` uses the same memory model on a model's files, so both give the same figures.

The cache is as large as memory allows. With offloading, SpeContext's Algorithm 2 runs: before
pages are added that would not fit, the next layer is offloaded, the last layers first. The planner
decides; the cache moves and loads.

Differences from the paper: it follows one sequence that only grows (section 6.2.1). Here
sequences begin and end, and layers become resident again before a step whose requests leave room
for them. Cached prompts that no request uses are evicted for that: they only fill free memory, and
never keep a layer offloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from keyhole.cache.layout import Geometry, ModelSize, bytes_per_page, memory_model
from keyhole.cache.pages import PageCache
from keyhole.cache.prefetch import Prefetcher
from keyhole.cache.prefix_cache import PrefixIndex
from keyhole.cache.tiers import FileTier, PinnedTier, Tier
from keyhole.config import EngineConfig, bytes_text
from keyhole.engine.head_runner import HeadRunner
from keyhole.errors import CapacityError, ConfigError
from keyhole.models import checkpoint
from keyhole.models.device_map import free_bytes
from keyhole.models.model import Model
from keyhole.planner import MemoryModel, MemoryPlan
from keyhole.policies.base import Policy
from keyhole.retrieval.config import HeadConfig
from keyhole.retrieval.draft import DraftModel
from keyhole.retrieval.gate import SeerGate
from keyhole.retrieval.head import RetrievalHead

#: Shapes per page by name: of one layer, or of the retrieval head.
PageData = Mapping[str, tuple[int, ...]]


def page_data(
    geometry: Geometry, policy: Policy, head: HeadConfig | None, *, drafts: bool = False
) -> list[PageData]:
    """The side data of a page: the policy's for each layer, then the head's.

    drafts: whether the head is a draft model's, which has values, too.
    """
    data: list[PageData] = [
        {} if layout.window is not None else policy.page_data(layout, geometry.page_size)
        for layout in geometry.layers
    ]
    if head is None:
        return [*data, {}]
    return [*data, HeadRunner.page_data(head, geometry.page_size, drafts=drafts)]


def model_size(model: Model, *selecting: nn.Module | None) -> ModelSize:
    """The size of a loaded model; tied weights and stored buffers count once.

    selecting: its retrieval head, or a whole draft model; its gate; None: without one.
    """
    stored = {x.data_ptr(): x.nbytes for x in model.network.state_dict().values()}
    own = [x for part in selecting if part is not None for x in part.parameters()]
    return ModelSize(
        weight_bytes=sum(stored.values()),
        head_weight_bytes=sum(x.nbytes for x in own),
        vocab_size=model.vocab_size,
        step_numbers=checkpoint.step_numbers(model.network.config),
    )


def sequence_bytes(policy: Policy, geometry: Geometry) -> int:
    """What a resolved policy keeps of a sequence, as `SequenceState` stores it."""
    return sum(
        math.prod(data.shape) * (geometry.itemsize if data.like_keys else torch.int32.itemsize)
        for data in policy.sequence_state(geometry).values()
    )


def widest_window(geometry: Geometry) -> int:
    """The largest sliding window of any layer, 0 without one."""
    return max((layer.window or 0 for layer in geometry.layers), default=0)


def page_limit(policy: Policy, geometry: Geometry, prompt: int, length: int) -> int:
    """The most pages of a sequence of `length` tokens, of which `prompt` are its prompt."""
    size = geometry.page_size
    pages, prompt_pages = -(-length // size), -(-prompt // size)
    allowed = policy.page_limit(np.asarray([prompt_pages]), size)
    if allowed is None:
        return pages
    window = widest_window(geometry)
    # An evicted page is held until it has left every window.
    seen = -(-window // size) + 1 if window else 0
    return min(pages, int(allowed[0]) + seen)


def movable(geometry: Geometry, policy: Policy) -> tuple[int, ...]:
    """Layers that may be offloaded under a policy, resolved.

    ConfigError if it reads everything of every layer, so that none may.
    """
    layers = policy.offloadable(geometry)
    if not layers or getattr(policy, "token_budget", None) is None:
        raise ConfigError(
            f"policy {policy.name!r} reads all keys of every layer of this model, so none can be "
            "offloaded; use a policy that selects, such as quest or spe_context, with fewer dense "
            "layers than the model has"
        )
    return layers


def memory_of(
    geometry: Geometry,
    policy: Policy,
    size: ModelSize,
    data: Sequence[PageData],
    *,
    layers: tuple[int, ...],
    requests: int,
    prefill_chunk: int,
    document_bytes: int = 0,
    gathers: bool = False,
    total: bool = True,
) -> MemoryModel:
    """The memory model of an engine with this resolved policy; `layers` may be offloaded.

    total: whether the limit is total_memory. If not, and if no layer may be offloaded, a page costs
    what it takes in the cache, without lists on the host and copies.
    """
    alone = not total and not layers
    found = memory_model(
        geometry,
        size,
        requests=requests,
        token_budget=getattr(policy, "token_budget", None) or 1,
        prefill_chunk=prefill_chunk,
        page_data=data,
        movable=layers,
        num_heads=policy.selection_heads(geometry),
        scores=policy.token_scores(geometry),
        sequence_bytes=sequence_bytes(policy, geometry),
        document_bytes=document_bytes,
        gathers=gathers and not alone,
    )
    return replace(found, list_page_bytes=0) if alone else found


def make_plan(memory: MemoryModel, config: EngineConfig) -> MemoryPlan:
    """What fits into the memory of `config`, with and without offloaded layers.

    CapacityError if not even the weights do.
    """
    if config.total_memory is not None:
        return MemoryPlan(model=memory, memory=config.total_memory)
    if config.memory is None:
        raise ConfigError(
            "offload needs memory=, which limits the keys and values in memory, or total_memory=, "
            "which also counts the weights and the activations of a step"
        )
    return MemoryPlan.for_cache(memory, config.memory)


@dataclass(frozen=True)
class Demand:
    """The pages that running sequences hold, int32 [n], and how many more they may need."""

    pages: np.ndarray
    growth: int


# Share of the free memory that the KV cache may use when no limit is given. The rest is left for
# activations and other processes.
_SHARE_OF_FREE = 0.8


def allocate(
    model: Model,
    geometry: Geometry,
    policy: Policy,
    config: EngineConfig,
    head: RetrievalHead | None,
    *,
    num_rows: int,
    reserved: int = 0,
    draft: DraftModel | None = None,
    gate: SeerGate | None = None,
) -> tuple[PageCache, LayerOffloader | None]:
    """An empty cache and, with `config.offload`, its layer offloader.

    num_rows: sequences that have buffers for offloaded layers. reserved: bytes of the cache's
    memory that something else takes. draft: the model whose head this is, if it proposes tokens.
    ConfigError if not a page fits, or if the policy has no layers that may move.
    """
    config_of_head = None if head is None else head.config
    data = page_data(geometry, policy, config_of_head, drafts=draft is not None)
    page_bytes, plan, hot = bytes_per_page(geometry, data), None, config.hot_document_bytes or 0
    if config.offload is not None or config.total_memory is not None:
        memory = memory_of(
            geometry,
            policy,
            model_size(model, head if draft is None else draft, gate),
            data,
            layers=() if config.offload is None else movable(geometry, policy),
            requests=num_rows,
            prefill_chunk=config.prefill_chunk,
            document_bytes=hot,
            gathers=model.device.type == "cuda",
        )
        plan = make_plan(memory, config)
        room, page_bytes = plan.cache_memory, memory.page_bytes(0)
    elif config.memory is None and model.layer_devices is not None:
        room = page_bytes * _pages_on_all(model.layer_devices, model.device, geometry, data)
    else:
        room = free_memory(model.device) if config.memory is None else config.memory
    max_pages = max(0, room - reserved - hot) // page_bytes
    if plan is not None and config.offload is not None:
        max_pages = max(plan.capacities)
    if max_pages < 1:
        beside = f", beside {bytes_text(reserved)} of recurrent state" if reserved else ""
        beside += f", beside hot_document_bytes {hot}" if hot else ""
        raise ConfigError(
            f"memory {bytes_text(room)} has no room for a page of {bytes_text(page_bytes)}{beside};"
            f" raise memory{', or lower hot_document_bytes' if hot else ''}"
        )
    cache = PageCache(
        geometry,
        max_pages,
        dtype=model.dtype,
        device=model.device,
        page_data=data[:-1],
        common=data[-1],
        layer_devices=model.layer_devices,
    )
    if plan is None or config.offload is None:
        return cache, None
    tier, lists = make_tier(config.offload, model.device), policy.selection_heads(geometry)
    return cache, LayerOffloader(plan, cache, tier, num_rows=num_rows, num_heads=lists)


def _pages_on_all(
    layers: Sequence[torch.device],
    home: torch.device,
    geometry: Geometry,
    data: Sequence[Mapping[str, tuple[int, ...]]],
) -> int:
    """The pages for which every device has memory, with layers on several.

    Devices of the CPU have one memory.
    """
    owners = [place if place.type == "cuda" else torch.device("cpu") for place in layers]
    each = dict.fromkeys(owners, 0)
    for number, place in enumerate(owners):
        alone = replace(geometry, layers=(geometry.layers[number],))
        each[place] += bytes_per_page(alone, [data[number]])
    first = home if home in each else owners[0]
    each[first] += bytes_per_page(replace(geometry, layers=()), [data[-1]])
    return min(free_memory(place) // size for place, size in each.items())


def too_long(
    length: int,
    cache: PageCache,
    offloader: LayerOffloader | None,
    config: EngineConfig,
    *,
    is_hybrid: bool,
) -> str:
    """The error message for a request of `length` tokens that can never be served.

    is_hybrid: whether the model has recurrent layers, beside which none may be offloaded.
    """
    if offloader is not None:
        layers, most = len(offloader.plan.model.order), cache.max_pages * config.page_size
        return (
            f"{length} tokens (prompt and max_tokens) do not fit into "
            f"{bytes_text(offloader.plan.cache_memory)} of KV cache, even with all {layers} layers "
            f"offloaded that may be; at most {most} fit: raise {_limit(config)}, or lower "
            "token_budget, max_batch or max_tokens"
        )
    pages = -(-length // config.page_size)
    need, have = (bytes_text(n * cache.page_bytes) for n in (pages, cache.max_pages))
    offload = ", set offload= to a folder that layers may move to (with a policy that selects),"
    return (
        f"{length} tokens (prompt and max_tokens) need {need} of KV cache, but the limit is "
        f"{have}; raise {_limit(config)}{'' if is_hybrid else offload} or lower max_tokens"
    )


def _limit(config: EngineConfig) -> str:
    """The setting that limits the cache."""
    return "memory=" if config.total_memory is None else "total_memory="


def free_memory(device: torch.device) -> int:
    """The bytes of free memory that the KV cache may use."""
    return int(_SHARE_OF_FREE * free_bytes(device))


class LayerOffloader:
    """Offloads layers and makes them resident again, to stay within the plan's memory.

    least: how many layers, once offloaded, stay so even where there is room for them.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        cache: PageCache,
        tier: Tier,
        *,
        num_rows: int,
        num_heads: int | None,
    ) -> None:
        self.plan = plan
        self.least = 0
        self._tier = tier
        self._cache = cache
        self._released = 0  # the cache's count of released pages at the last check
        self.prefetcher = Prefetcher(
            cache, num_rows=num_rows, token_budget=plan.model.token_budget, num_heads=num_heads
        )
        cache.room = self

    @property
    def offloaded(self) -> int:
        """The number of offloaded layers."""
        return len(self.prefetcher.layers)

    @property
    def pages(self) -> int:
        """The pages that fit without moving a layer."""
        return self.plan.capacities[self.offloaded]

    def allowed(self, least: int, wanted: int) -> int:
        """How many of `wanted` pages fit, once enough layers are offloaded for `least`."""
        target = self._offloaded_for(least)
        return max(least, min(wanted, self.plan.capacities[max(target, self.offloaded)]))

    def make(self, pages: int) -> None:
        """Offloads layers until so many pages fit."""
        self.offload_layer(self._offloaded_for(pages))

    def _offloaded_for(self, pages: int) -> int:
        target = self.plan.offloaded_for(pages)
        if target is None:  # the cache's own limit is lower
            raise CapacityError(f"{pages} pages do not fit, with all layers offloaded")
        return target

    def offload_layer(self, count: int) -> None:
        """Offloads layers until at least `count` are offloaded."""
        while self.offloaded < count:
            self._released = -1  # check again: the need may have gone before the step
            self.prefetcher.offload(self.plan.model.order[self.offloaded], self._tier)

    @property
    def may_become_resident(self) -> bool:
        """Whether layers are offloaded and pages were released since the last check."""
        return self.offloaded > self.least and self._released != self._cache.released

    def make_resident(
        self,
        demand: Demand,
        prefix: PrefixIndex | None,
        renumber: Callable[[Mapping[int, int]], None],
    ) -> None:
        """Makes layers resident that fit in addition to the pages of running sequences. Between
        steps.

        renumber: called with the new numbers of pages that moved; `prefix` is renumbered here.
        """
        self._released = self._cache.released
        held = np.asarray([] if prefix is None else prefix.held(), np.int32)
        unused = np.setdiff1d(held, demand.pages)
        pages, others = len(demand.pages) + self._cache.num_aside, self._cache.reserved
        room = pages + others
        target = self.plan.still_offloaded(room, demand.growth, self.offloaded, self.least)
        if target == self.offloaded or pages + len(unused) < self._cache.in_use:
            return  # in the second case other holders of pages cannot be given new page numbers
        most = min(self.plan.capacities[target : self.offloaded]) - others
        if prefix is not None:
            prefix.evict(self._cache.in_use - most)
            self._released = self._cache.released
        numbers = self._cache.pack()
        if prefix is not None:
            prefix.renumber(numbers)
        renumber(numbers)
        try:
            self._cache.cut(min(most, self._cache.capacity))
            while self.offloaded > target:
                self.prefetcher.restore(self.plan.model.order[self.offloaded - 1])
        except CapacityError:
            return  # no free memory: an offloaded layer gives the same results, only slower


def make_tier(folder: str, device: torch.device) -> Tier:
    """The offload tier: pinned host memory for a GPU, files in `folder` for a CPU."""
    return PinnedTier() if device.type == "cuda" else FileTier(folder)

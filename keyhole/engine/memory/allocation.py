"""Makes the cache of an engine: as large as memory allows, with offloading if wanted."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from keyhole.cache.layout import Geometry
from keyhole.cache.pages import PageCache, bytes_per_page
from keyhole.config import EngineConfig
from keyhole.engine.memory.layer_offloader import LayerOffloader, make_tier
from keyhole.engine.memory.plan import make_plan, memory_of, model_size, movable, page_data
from keyhole.errors import ConfigError
from keyhole.models.loading import Model
from keyhole.policies.base import Policy
from keyhole.retrieval.head import RetrievalHead

# Share of the free memory that the KV cache may take when no limit is given; the rest is for
# activations and for the other programs of the machine.
_SHARE_OF_FREE = 0.8

_MEMINFO = Path("/proc/meminfo")


def allocate(
    model: Model,
    geometry: Geometry,
    policy: Policy,
    config: EngineConfig,
    head: RetrievalHead | None,
    *,
    num_rows: int,
) -> tuple[PageCache, LayerOffloader | None]:
    """An empty cache, and who moves its layers down where `config.offload` is given.

    num_rows: sequences with buffers of layers below.
    ConfigError if not a page fits, or if the policy has no layers that may move.
    """
    data = page_data(geometry, policy, None if head is None else head.config)
    page_bytes, plan = bytes_per_page(geometry, data), None
    if config.offload is not None or config.total_memory is not None:
        memory = memory_of(
            geometry,
            policy,
            model_size(model, head),
            data,
            layers=() if config.offload is None else movable(geometry, policy),
            requests=num_rows,
            prefill_chunk=config.prefill_chunk,
        )
        plan = make_plan(memory, config)
        room = plan.cache_memory
    else:
        room = free_memory(model.device) if config.memory is None else config.memory
    max_pages = room // page_bytes
    if plan is not None and config.offload is not None:
        max_pages = max(plan.capacities)
    if max_pages < 1:
        raise ConfigError(f"memory {room} bytes holds no page of {page_bytes} bytes")
    cache = PageCache(
        geometry,
        max_pages,
        dtype=model.dtype,
        device=model.device,
        page_data=data[:-1],
        common=data[-1],
    )
    if plan is None or config.offload is None:
        return cache, None
    tier, lists = make_tier(config.offload, model.device), policy.selection_heads(geometry)
    return cache, LayerOffloader(plan, cache, tier, num_rows=num_rows, num_heads=lists)


def too_long(
    length: int, cache: PageCache, placement: LayerOffloader | None, config: EngineConfig
) -> str:
    """Why a request of `length` tokens can never be served, and what helps."""
    if placement is not None:
        layers, most = len(placement.plan.model.order), cache.max_pages * config.page_size
        return (
            f"{length} tokens (prompt and max_tokens) do not fit into "
            f"{placement.plan.cache_memory} bytes of KV cache with all {layers} layers that may be "
            f"offloaded: {most} do; raise {_limit(config)}, or lower token_budget, max_batch "
            "or max_tokens"
        )
    pages = -(-length // config.page_size)
    need, have = (n * cache.page_bytes / 2**20 for n in (pages, cache.max_pages))
    return (
        f"{length} tokens (prompt and max_tokens) need {need:.1f} MiB of KV cache, the limit is "
        f"{have:.1f} MiB; raise {_limit(config)}, set offload= to a folder that layers may move to "
        "(with a policy that selects), or lower max_tokens"
    )


def _limit(config: EngineConfig) -> str:
    """The setting that limits the cache, or would."""
    return "memory=" if config.total_memory is None else "total_memory="


def free_memory(device: torch.device) -> int:
    """Bytes that the KV cache may take of what is free now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    elif _MEMINFO.is_file():
        # MemAvailable counts what the kernel would give up, such as cached files; MemFree does not.
        text = _MEMINFO.read_text()
        free = 1024 * int(text[text.index("MemAvailable:") :].split()[1])
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return int(_SHARE_OF_FREE * free)

"""Which layers live where while texts grow: SpeContext's Algorithm 2 (section 6.3) at run time.

Before pages are added that would not fit, the next layer moves to the lower tier, the last layers
first. What is decided comes from the planner, what is moved and loaded from the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from keyhole.cache.footprint import data_bytes, layer_memory
from keyhole.cache.layout import Geometry
from keyhole.cache.pages import PageCache
from keyhole.cache.prefetch import Prefetcher
from keyhole.cache.tiers import FileTier, PinnedTier, Tier
from keyhole.config import EngineConfig
from keyhole.errors import CapacityError, ConfigError
from keyhole.planner import MemoryModel, Plan
from keyhole.policy.base import Policy


class Placement:
    """Moves layers of a cache down, so that its upper tier stays within the plan's memory."""

    def __init__(
        self, plan: Plan, cache: PageCache, tier: Tier, *, num_rows: int, num_heads: int | None
    ) -> None:
        self.plan = plan
        self._tier = tier
        self._cache = cache
        self.prefetcher = Prefetcher(
            cache, num_rows=num_rows, token_budget=plan.model.token_budget, num_heads=num_heads
        )
        cache.before_growth = self.make_room

    @property
    def offloaded(self) -> int:
        """Layers on the lower tier."""
        return len(self.prefetcher.layers)

    def make_room(self, least: int, wanted: int) -> int:
        """Moves layers down until `least` pages fit; returns how many of `wanted` may be there."""
        target = self.plan.offloaded_for(least)
        if target is None:  # the cache has a limit of its own, which is lower
            raise CapacityError(f"{least} pages do not fit, with all layers on the lower tier")
        while self.offloaded < target:
            self.prefetcher.offload(self.plan.model.order[self.offloaded], self._tier)
        return max(least, min(wanted, self.plan.capacities[self.offloaded]))


def make_plan(
    geometry: Geometry,
    policy: Policy,
    config: EngineConfig,
    page_data: Sequence[Mapping[str, tuple[int, ...]]],
    num_rows: int,
) -> Plan:
    """What fits into `config.memory` bytes of keys and values, with layers below and without.

    ConfigError if the policy reads everything of every layer, so that none may move.
    """
    movable = policy.offloadable(geometry)
    budget = getattr(policy, "token_budget", None)
    if not movable or budget is None:
        raise ConfigError(
            f"policy {policy.name!r} reads all keys of every layer, so none can live on a lower "
            "tier; offload goes with a policy that selects, such as delta, quest or spe_context"
        )
    if config.memory is None:
        raise ConfigError("offload needs memory=, the most that keys and values may take above")
    layers = tuple(
        dataclasses.replace(layer, movable=layer.movable and i in movable)
        for i, layer in enumerate(layer_memory(geometry, policy.selection_heads(geometry)))
    )
    model = MemoryModel.measured(
        layers=layers,
        requests=num_rows,
        token_budget=budget,
        page_size=geometry.page_size,
        weight_bytes=0,
        page_data_bytes=data_bytes(geometry, page_data),
    )
    return Plan(model=model, memory=config.memory)


def make_tier(folder: str, device: torch.device) -> Tier:
    """Pinned memory of the host below a GPU, files in `folder` below the memory of a CPU."""
    return PinnedTier() if device.type == "cuda" else FileTier(folder)

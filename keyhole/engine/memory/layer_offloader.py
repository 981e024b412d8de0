"""Which layers live where while texts grow and end: SpeContext's Algorithm 2 at run time.

Before pages are added that would not fit, the next layer is offloaded, the last layers
first. What is decided comes from the planner, what is moved and loaded from the cache.

Differences from the paper: it follows one text that only grows (section 6.2.1). Here texts come and
go, and layers move up again before a step whose requests leave room for them. Known prompts that no
request uses are given up for that: they fill what is free above, and hold no layer below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from keyhole.cache.offload.prefetch import Prefetcher
from keyhole.cache.offload.tiers import FileTier, PinnedTier, Tier
from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import PrefixIndex
from keyhole.engine.scheduler import Demand
from keyhole.errors import CapacityError
from keyhole.planner import MemoryPlan


class LayerOffloader:
    """Offloads layers of a cache and brings them back, to stay within the plan's memory.

    least: layers that stay below even where there is room for them, once they are there.
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
        self._released = 0  # by the cache, when it was last looked at whether layers may come up
        self.prefetcher = Prefetcher(
            cache, num_rows=num_rows, token_budget=plan.model.token_budget, num_heads=num_heads
        )
        cache.room = self

    @property
    def offloaded(self) -> int:
        """Offloaded layers."""
        return len(self.prefetcher.layers)

    @property
    def pages(self) -> int:
        """Pages that fit with every layer where it is."""
        return self.plan.capacities[self.offloaded]

    def make(self, least: int, wanted: int) -> int:
        """Moves layers down until `least` pages fit; returns how many of `wanted` may be there."""
        target = self.plan.offloaded_for(least)
        if target is None:  # the cache has a limit of its own, which is lower
            raise CapacityError(f"{least} pages do not fit, with all layers offloaded")
        self.move_down(target)
        return max(least, min(wanted, self.pages))

    def move_down(self, count: int) -> None:
        """Moves layers down until at least `count` are below."""
        while self.offloaded < count:
            self._released = -1  # what it was done for may be gone before the step
            self.prefetcher.offload(self.plan.model.order[self.offloaded], self._tier)

    @property
    def may_come_up(self) -> bool:
        """Whether layers are below, and somebody has given up pages since it was last looked at."""
        return self.offloaded > self.least and self._released != self._cache.released

    def move_up(
        self,
        demand: Demand,
        prefix: PrefixIndex | None,
        renumber: Callable[[Mapping[int, int]], None],
    ) -> None:
        """Moves those layers up that fit beside what running sequences need. Between steps.

        renumber: tells everybody but `prefix` the new numbers of pages that had to move.
        """
        self._released = self._cache.released
        unused = set() if prefix is None else set(prefix.held()) - demand.pages
        pages = len(demand.pages) + self._cache.num_aside
        target = self.plan.left_below(pages, demand.growth, self.offloaded, self.least)
        if target == self.offloaded or pages + len(unused) < self._cache.in_use:
            return  # in the second case somebody else holds pages, and may not have others
        most = min(self.plan.capacities[target : self.offloaded])
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
            return  # somebody else has the memory; a layer is as right below, only slower


def make_tier(folder: str, device: torch.device) -> Tier:
    """Pinned memory of the host below a GPU, files in `folder` below the memory of a CPU."""
    return PinnedTier() if device.type == "cuda" else FileTier(folder)

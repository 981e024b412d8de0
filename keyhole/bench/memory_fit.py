"""Which systems of the decode benchmark fit into memory beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keyhole.bench import memory
from keyhole.bench.settings import ALL_PEERS, PAGE_SIZE
from keyhole.bench.systems.keyhole_system import needed_bytes
from keyhole.bench.systems.outside import Need
from keyhole.cache.layout import Geometry
from keyhole.models.loading import Model

#: What stays free for the rest of the machine.
RESERVE_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A system that does not fit; None: ours, and with them the whole context."""

    context: int
    batch: int
    system: str | None
    need_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        who = "the caches" if self.system is None else self.system
        where = f"{self.context:,} tokens, batch {self.batch}"
        need, free = memory.gib(self.need_bytes), memory.gib(self.free_bytes)
        return f"skipped at {where}: {who} would need {need}, {free} are free"

    def as_dict(self) -> dict[str, Any]:
        """For a line of results."""
        return asdict(self)


def fitting(
    model: Model,
    policies: Sequence[str],
    peers: Sequence[str],
    *,
    batch: int,
    context: int,
    steps: int,
    outside: tuple[str, Need] | None = None,
) -> tuple[list[str], list[Skipped]]:
    """The peers for which there is room beside our cache, one after the other, and who is left out.

    `outside`: a system in another process and what it needs, the first to get room beside ours; it
    is filled before there is anything else. If there is no room for our cache itself, that is the
    one entry of the second list.
    """
    free = max(0, memory.free_bytes(model.device) - RESERVE_BYTES)
    geometry = model.geometry(PAGE_SIZE)
    past = batch * (context + steps) * geometry.token_bytes
    layer = past // geometry.num_layers

    def skipped(system: str | None, need: int) -> Skipped:
        sizes = {"need_bytes": need, "free_bytes": free}
        return Skipped(context=context, batch=batch, system=system, **sizes)

    ours = needed_bytes(model, policies, batch, context, steps)
    # While a layer of a sequence is written there are its keys, and the same in the order of pages.
    writing = layer // batch
    if ours + writing > free:
        return [], [skipped(None, ours + writing)]
    free -= ours
    kept: list[str] = []
    left_out: list[Skipped] = []
    if outside is not None:
        name, its = outside
        need = its.stays + max(writing, its.passes - ours)
        if need > free:
            left_out.append(skipped(name, need))
        else:
            kept.append(name)
            free -= its.stays
    for name in peers:
        kind = ALL_PEERS[name][1]
        is_there = any(ALL_PEERS[other][1] == kind for other in kept if other in ALL_PEERS)
        need = (0 if is_there else past) + passing_layers(name, geometry) * layer
        if need > free:
            left_out.append(skipped(name, need))
        else:
            kept.append(name)
            free -= 0 if is_there else past
    return kept, left_out


def passing_layers(name: str, geometry: Geometry) -> int:
    """The most that a peer needs for a moment, in layers of its cache."""
    attention, kind = ALL_PEERS[name]
    group = geometry.num_query_heads // geometry.layers[0].num_kv_heads
    # A dynamic cache copies one layer at a time; eager repeats keys and values for each head.
    # While a cache is filled, a layer and parts of its copy pass.
    return max(2, (kind == "dynamic") + (group if attention == "eager" else 1))

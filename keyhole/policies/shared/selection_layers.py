"""Selection layers, which select for the layers after them (DELTA, TidalDecode, OmniKV)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keyhole.cache.layout import Geometry
from keyhole.config import require, require_layers


def settled(name: str, given: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    """The selection layers, ascending. ConfigError for one that is not a full-attention layer."""
    require_layers(name, given)
    usable = geometry.full_attention
    for layer in given:
        require(layer in usable, name, given, f"full-attention layers of {usable}")
    return tuple(sorted(set(given)))


def nearest(wanted: Iterable[int], geometry: Geometry) -> tuple[int, ...]:
    """The full-attention layers nearest to those wanted; ties go to the earlier one."""
    usable = geometry.full_attention
    if not usable:
        return ()
    return tuple(sorted({min(usable, key=lambda i: (abs(i - layer), i)) for layer in wanted}))


def served(
    choosing: Sequence[int] | None, full: Sequence[int] | None, geometry: Geometry
) -> tuple[int, ...]:
    """The sparse layers: those after the first selection layer that do not select."""
    reads_all = {*(full or ()), *(choosing or ())}
    first = min(choosing or (geometry.num_layers,))
    return tuple(i for i in geometry.full_attention if i > first and i not in reads_all)


def dense(
    choosing: Sequence[int] | None, full: Sequence[int] | None, geometry: Geometry
) -> tuple[int, ...]:
    """Layers that read everything in every step: full-attention layers except those `served`."""
    sparse = served(choosing, full, geometry)
    return tuple(i for i in geometry.full_attention if i not in sparse)


def following(choosing: Sequence[int], count: int, geometry: Geometry) -> tuple[int, ...]:
    """The next `count` full-attention layers after each selection layer, ascending."""
    usable = geometry.full_attention
    after = ([i for i in usable if i > layer][:count] for layer in choosing)
    return tuple(sorted({i for layers in after for i in layers}))

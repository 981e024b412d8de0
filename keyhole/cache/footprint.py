"""What a cache of a given shape costs, in the terms of the planner; plain numbers, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from keyhole.cache.layout import Geometry
from keyhole.planner import LayerMemory

#: A place in a buffer remembers its token, per head, in an int32.
_ENTRY_BYTES = 4


def layer_memory(geometry: Geometry, num_heads: int | None = None) -> tuple[LayerMemory, ...]:
    """What each layer keeps. Those with a window stay above: they read its last tokens anyway.

    num_heads: lists of a selection where they are more than KV heads, as for `ElasticBuffer`.
    """
    return tuple(
        LayerMemory(
            token_bytes=layer.numbers_per_token * geometry.itemsize,
            slot_bytes=(num_heads or layer.num_kv_heads)
            * (layer.numbers_per_head * geometry.itemsize + _ENTRY_BYTES),
            movable=layer.window is None,
        )
        for layer in geometry.layers
    )


def data_bytes(geometry: Geometry, shapes: Iterable[Mapping[str, tuple[int, ...]]]) -> int:
    """Bytes per page of the side data of these shapes: a policy's, layer by layer, or a head's."""
    numbers = sum(math.prod(shape) for layer in shapes for shape in layer.values())
    return numbers * geometry.itemsize

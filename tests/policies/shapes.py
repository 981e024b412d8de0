"""The geometry of models that need no weights."""

from __future__ import annotations

from keyhole.cache.layout import Geometry, LayerLayout


def shape(num_layers: int, page_size: int = 16, *, full: tuple[int, ...] | None = None) -> Geometry:
    """One head of 4 numbers; layers that are not in `full` have a window. None: none has."""
    layers = [
        LayerLayout(
            num_kv_heads=1,
            key_dim=4,
            value_dim=4,
            window=None if full is None or i in full else 8,
        )
        for i in range(num_layers)
    ]
    return Geometry(layers=tuple(layers), num_query_heads=1, page_size=page_size, itemsize=2)

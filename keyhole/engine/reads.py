"""What the layers of a step read for its decoding sequences, counted."""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.cache.layout import Geometry
from keyhole.policy.base import Policy, Selection, Step


def counted(
    reads: list[Selection | None], step: Step, geometry: Geometry, policy: Policy
) -> Tensor:
    """Float64 [B, 3]: attended fraction, bytes of keys and values, other bytes. No host sync.

    reads: what each layer read.
    """
    fraction, kv_bytes = attended(reads, step, geometry)
    other = policy.overhead_bytes(geometry, step)
    other = torch.zeros_like(kv_bytes) if other is None else other.double()
    return torch.stack([fraction, kv_bytes, other], 1)


def attended(
    reads: list[Selection | None], step: Step, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Attended fraction (mean over layers) and bytes of keys and values, float64 [B] each."""
    length = step.lengths.double()  # also of what was evicted
    tokens: dict[object, Tensor] = {}
    fraction, kv_bytes = torch.zeros_like(length), torch.zeros_like(length)
    for layer, selection in zip(geometry.layers, reads, strict=True):
        # Layers that share a selection or a window share the count.
        key = layer.window if selection is None else id(selection)
        if key not in tokens:
            tokens[key] = _tokens(selection, layer.window, step)
        fraction += tokens[key] / length
        # With MLA every head may read latents of its own choice.
        lists = 1 if selection is None else selection.indices.shape[1]
        heads = max(layer.num_kv_heads, lists)
        kv_bytes += tokens[key] * (heads * layer.numbers_per_head * geometry.itemsize)
    return fraction / len(reads), kv_bytes


def _tokens(selection: Selection | None, window: int | None, step: Step) -> Tensor:
    """Tokens read per KV head, float64 [B], mean over the heads."""
    if selection is None:
        whole = step.remaining or step
        read = whole.lengths if window is None else step.lengths.clamp(max=window)
        return read.double()
    counts = selection.counts.double().mean(1)
    # All pages are full but the newest, which is always selected.
    missing = step.pages * step.page_size - step.lengths if selection.unit > 1 else 0
    return counts * selection.unit - missing

"""What the layers of a step read for its decoding sequences, counted."""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.cache.layout import Geometry
from keyhole.policies.base import Policy, Selection, Step


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
    """Attended fraction (mean over layers) and bytes of keys and values, float64 [B] each.

    Bytes are those of a kernel that reads every list by itself: where each query head has a list of
    its own, a token in the lists of two heads of a group counts twice.
    """
    length = step.lengths.double()  # also of what was evicted
    # Layers that share a selection or a window share the count: how many, and bytes of a token.
    alike: dict[object, tuple[Selection | None, int | None, int, int]] = {}
    for layer, selection in zip(geometry.layers, reads, strict=True):
        key = layer.window if selection is None else id(selection)
        # There may be a list for each query head.
        lists = 1 if selection is None else selection.indices.shape[1]
        token_bytes = max(layer.num_kv_heads, lists) * layer.numbers_per_head * geometry.itemsize
        *_, number, so_far = alike.get(key, (None, None, 0, 0))
        alike[key] = selection, layer.window, number + 1, so_far + token_bytes
    read, kv_bytes = torch.zeros_like(length), torch.zeros_like(length)
    for selection, window, number, token_bytes in alike.values():
        tokens = _tokens(selection, window, step)
        read.add_(tokens, alpha=number)
        kv_bytes.add_(tokens, alpha=token_bytes)
    return read / (length * len(reads)), kv_bytes


def _tokens(selection: Selection | None, window: int | None, step: Step) -> Tensor:
    """Tokens read per KV head, float64 [B], mean over the heads."""
    if selection is None:
        whole = step.retained or step
        read = whole.lengths if window is None else step.lengths.clamp(max=window)
        return read.double()
    counts = selection.counts.double()
    counts = counts.mean(1) if counts.shape[1] > 1 else counts[:, 0]
    # All pages are full but the newest, which is always selected.
    missing = step.pages * step.page_size - step.lengths if selection.unit > 1 else 0
    return counts * selection.unit - missing

"""The shape of one token's keys and values, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """One layer's part of the KV cache.

    With `shared_values` (MLA's latents) a value is the first `value_dim` numbers of its key and is
    not stored a second time.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # the layer's own sliding window in tokens; None is full attention
    shared_values: bool = False
    num_query_heads: int = 0  # for a policy's data per query head; 0 without any

    @property
    def numbers_per_token(self) -> int:
        """Numbers stored per token: all KV heads, keys and values."""
        return self.num_kv_heads * self.numbers_per_head

    @property
    def numbers_per_head(self) -> int:
        """Numbers stored per token and KV head."""
        return self.key_dim + (0 if self.shared_values else self.value_dim)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The shape of a model and its cache, as methods need it; plain numbers, no tensors."""

    layers: tuple[LayerLayout, ...]
    num_query_heads: int
    page_size: int
    itemsize: int  # bytes of one cached number
    calibration: Path | None = None  # DELTA layers measured for this model, beside its weights
    stability: Path | None = None  # and SamKV's stable layers

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def full_attention(self) -> tuple[int, ...]:
        """Layers without a window of their own: the only ones that a policy selects for."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.window is None)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.itemsize * sum(layer.numbers_per_token for layer in self.layers)

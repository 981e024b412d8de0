"""Keys and values side by side in room set aside for them, written in place and never copied.

With torch's flash attention over exactly what is there, which `StaticCache` of transformers has not
(it reads all of its room under a mask, which flash attention does not take).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer


class _Layer(DynamicLayer):  # type: ignore[misc] # transformers is not typed
    """room: tokens."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._length = 0

    def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
        """Sets the room aside, for keys and values [B, Hkv, T, D] like these."""
        super().lazy_initialization(keys, values)
        self._all = [x.new_empty(*x.shape[:2], self._room, x.shape[3]) for x in (keys, values)]

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes new tokens behind the others; everything, as views."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        begin = self._length
        for room, new in zip(self._all, (keys, values), strict=True):
            room[:, :, begin : begin + new.shape[2]] = new
        self.crop(keys.shape[2])
        return self.keys, self.values

    def crop(self, tokens: int) -> None:
        """Changes the length by so many tokens, as a rule less."""
        self._length += tokens
        self.keys, self.values = (room[:, :, : self._length] for room in self._all)


def in_place_cache(config: Any, room: int) -> DynamicCache:
    """An empty cache for that many tokens."""
    cache = DynamicCache(config=config)
    cache.layers = [_Layer(room) for _ in range(config.num_hidden_layers)]
    return cache


def _flash(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One new token of each sequence sees everything: query [B, Hq, 1, D]."""
    assert query.shape[2] == 1, "decode steps only"
    assert mask is None, "none is registered under our name"
    # Elsewhere torch chooses; here nothing slower may take its place.
    only = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if query.is_cuda else contextlib.nullcontext()
    with only:
        out = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


# transformers takes every name with "flash" in it for a package to load.
AttentionInterface.register("in_place", _flash)

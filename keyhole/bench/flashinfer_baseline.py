"""FlashInfer's dense decode steps, a baseline where the package `flashinfer` is installed.

Keys and values are in pages of 16 tokens, of one sequence after the other, and written in place.
FlashInfer plans a step on the host from the lengths (Ye et al., FlashInfer, arXiv 2501.01005,
section 3.3). A plan is made when the length changes, so none is made in the timed steps, which all
have the same length, and they can be replayed as a CUDA graph.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from keyhole.bench.settings import PAGE_SIZE
from keyhole.errors import ConfigError

#: The size that FlashInfer's documentation gives its workspace.
_WORKSPACE_BYTES = 128 << 20
#: Query heads of a group from which FlashInfer's documentation advises tensor cores.
_TENSOR_CORES = 4


def is_installed() -> bool:
    """Whether FlashInfer can be imported."""
    return importlib.util.find_spec("flashinfer") is not None


class _Plan:
    """FlashInfer's plan for a step of all sequences at one length, shared by all layers."""

    def __init__(self) -> None:
        self._length = -1
        self._wrapper: Any = None

    def run(self, query: Tensor, layer: _PagedLayer, scale: float) -> Tensor:
        """Attention of query [B, Hq, D] over all tokens of a layer; plans if the length is new."""
        if self._wrapper is None:
            package = importlib.import_module("flashinfer")
            workspace = query.new_zeros(_WORKSPACE_BYTES, dtype=torch.uint8)
            group = query.shape[1] // layer.key_pages.shape[1]
            self._wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", use_tensor_cores=group >= _TENSOR_CORES
            )
        if self._length != layer.length:
            self._length = layer.length
            self._make(query, layer, scale)
        out: Tensor = self._wrapper.run(query, (layer.key_pages, layer.value_pages))
        return out

    def _make(self, query: Tensor, layer: _PagedLayer, scale: float) -> None:
        (batch, num_heads, dim), device = query.shape, query.device
        filled = -(-layer.length // PAGE_SIZE)
        first = torch.arange(batch, dtype=torch.int32, device=device) * layer.pages_per_sequence
        indices = first[:, None] + torch.arange(filled, dtype=torch.int32, device=device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * filled
        last = layer.length - (filled - 1) * PAGE_SIZE
        self._wrapper.plan(
            starts,
            indices.flatten(),
            torch.full((batch,), last, dtype=torch.int32, device=device),
            num_heads,
            layer.key_pages.shape[1],
            dim,
            PAGE_SIZE,
            q_data_type=query.dtype,
            sm_scale=scale,
        )


class _PagedLayer(DynamicLayer):  # type: ignore[misc] # transformers is not typed
    """Keys and values [P, Hkv, page_size, D] of one layer, with room for `room` tokens each."""

    def __init__(self, room: int, plan: _Plan) -> None:
        super().__init__()
        self.length = 0
        self.pages_per_sequence = -(-room // PAGE_SIZE)
        self.plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the pages, for keys and values [B, Hkv, T, D] like these."""
        super().lazy_initialization(key_states, value_states)
        pages = key_states.shape[0] * self.pages_per_sequence
        self.key_pages, self.value_pages = (
            x.new_empty(pages, x.shape[1], PAGE_SIZE, x.shape[3])
            for x in (key_states, value_states)
        )
        self.keys, self.values = self.key_pages, self.value_pages

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Appends new tokens; returns itself twice, as `_attend` reads from this object."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        begin, count = self.length, keys.shape[2]
        for stored, new in ((self.key_pages, keys), (self.value_pages, values)):
            pages = stored.unflatten(0, (-1, self.pages_per_sequence))  # [B, M, Hkv, page_size, D]
            if count == 1:
                pages[:, begin // PAGE_SIZE, :, begin % PAGE_SIZE] = new[:, :, 0]
            else:
                place = torch.arange(begin, begin + count, device=new.device)
                pages[:, place // PAGE_SIZE, :, place % PAGE_SIZE] = new.permute(2, 0, 1, 3)
        self.length += count
        return self, self

    def get_seq_length(self) -> int:
        """The number of tokens."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens; as in transformers, their number is negative."""
        self.length += tokens_to_remove


def paged_cache(config: Any, room: int) -> DynamicCache:
    """An empty cache for this many tokens. ConfigError where FlashInfer is not installed."""
    if not is_installed():
        raise ConfigError("system 'flashinfer' needs the package flashinfer: install it")
    cache: Any = DynamicCache(config=config)
    plan = _Plan()
    cache.layers = [_PagedLayer(room, plan) for _ in range(config.num_hidden_layers)]
    return cache


def _attend(
    module: Any,
    query: Tensor,
    key: _PagedLayer,
    value: _PagedLayer,
    mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token per sequence over everything: query [B, Hq, 1, D]."""
    assert query.shape[2] == 1, "decode steps only"
    assert mask is None, "none is registered under our name"
    return key.plan.run(query[:, :, 0], key, scaling)[:, None], None


# transformers tries to load a package for every name that contains "flash".
AttentionInterface.register("in_pages", _attend)

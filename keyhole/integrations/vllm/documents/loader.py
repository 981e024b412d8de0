"""Writes keys and values of stored documents into vLLM's pages, rotated to their positions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group

from keyhole.documents.store import StoredDocument
from keyhole.integrations.vllm.backend import model_layers
from keyhole.integrations.vllm.documents.facts import facts_of
from keyhole.integrations.vllm.documents.requests import DocumentRequest

# Tokens of a layer that are read, rotated and written at once.
_PIECE = 1024


class DocumentLoader:
    """The stored documents on one rank of an engine."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        facts = facts_of(config)
        self._lookup, self._shift, self._device = facts.lookup(), facts.shift(), device
        self._block_size = int(config.cache_config.block_size)
        self._layers: Any = model_layers(config)
        rank, ranks = get_tp_group().rank_in_group, get_tp_group().world_size
        self._heads = []
        for number, layer in self._layers.items():
            every = facts.geometry.layers[number].num_kv_heads
            first = rank * every // ranks  # a head is on several ranks where there are fewer
            self._heads.append(slice(first, first + int(layer.num_kv_heads)))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.inference_mode()
    def load(self, request: DocumentRequest, blocks: Sequence[int], begin: int) -> None:
        """Writes the documents' tokens from position `begin` on into the request's blocks.

        Returns when they are written. Called in a thread beside the engine's steps. RecordError
        for a record that is gone or cannot be read.
        """
        if self._stream is None:
            self._load(request, blocks, begin)
            return
        with torch.cuda.stream(self._stream):
            self._load(request, blocks, begin)
        self._stream.synchronize()

    def _load(self, request: DocumentRequest, blocks: Sequence[int], begin: int) -> None:
        table = torch.tensor(blocks, dtype=torch.int64)
        with ExitStack() as stack:
            opened: dict[str, StoredDocument] = {}
            for name, digest, offset in zip(
                request.names, request.digests, request.offsets, strict=True
            ):
                if digest not in opened:
                    opened[digest] = stack.enter_context(self._lookup.open(name, digest))
                document = opened[digest]
                for start in range(max(0, begin - offset), document.length, _PIECE):
                    stop = min(document.length, start + _PIECE)
                    positions = torch.arange(offset + start, offset + stop)
                    size = self._block_size
                    slots = table[positions // size] * size + positions % size
                    by = offset if request.shifted else 0
                    self._put(document, start, stop, by, slots.to(self._device))

    def _put(self, document: StoredDocument, start: int, stop: int, by: int, slots: Tensor) -> None:
        """Rows of a document into slots, layer by layer."""
        for number, heads in enumerate(self._heads):
            keys, values = document.rows(number, start, stop)
            assert values is not None, "models with latent attention are refused"
            layer = self._layers[number]
            key = self._shift.turn(number, keys[:, heads].to(self._device), by)
            value = values[:, heads].to(self._device).contiguous()
            layer.impl.do_kv_cache_update(layer, key.contiguous(), value, layer.kv_cache, slots)

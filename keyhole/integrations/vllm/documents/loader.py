"""Writes keys and values of stored documents into vLLM's pages, rotated to their positions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group

from keyhole.documents.store import StoredDocument
from keyhole.engine.documents.loader import placed
from keyhole.integrations.vllm.backend import model_layers
from keyhole.integrations.vllm.documents.facts import facts_of
from keyhole.integrations.vllm.documents.layout import Layout
from keyhole.integrations.vllm.documents.requests import DocumentRequest
from keyhole.reuse import make_reuse
from keyhole.reuse.base import PlacedDocument, Reuse

# Tokens of a layer that are read, rotated and written at a time.
_PIECE = 1024


class DocumentLoader:
    """The stored documents on one rank of an engine.

    page_size: tokens per block of vLLM. num_layers: of the model.
    """

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self._facts = facts = facts_of(config)
        self._lookup, self._shift, self._device = facts.lookup(), facts.shift(), device
        self.page_size = int(config.cache_config.block_size)
        self.num_layers = facts.geometry.num_layers
        self._layers: Any = model_layers(config)
        rank, ranks = get_tp_group().rank_in_group, get_tp_group().world_size
        self._heads = []
        for number, layer in self._layers.items():
            every = facts.geometry.layers[number].num_kv_heads
            # With fewer heads than ranks, several ranks have the same head.
            first = rank * every // ranks
            self._heads.append(slice(first, first + int(layer.num_kv_heads)))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Documents of requests that have not chosen yet.
        self._held: dict[str, tuple[ExitStack, list[StoredDocument]]] = {}

    @torch.inference_mode()
    def load(self, name: str, request: DocumentRequest, blocks: Sequence[int], begin: int) -> None:
        """Writes the documents' tokens from position `begin` on into the request's blocks.

        For a method that chooses, loads its probe tokens, regardless of `begin`; its documents stay
        open under the request's name until `close`. Returns when everything is written. Called in a
        thread while the engine runs steps. RecordError for a record that is missing or cannot be
        read.
        """
        if self._stream is None:
            self._load(name, request, blocks, begin)
            return
        with torch.cuda.stream(self._stream):
            self._load(name, request, blocks, begin)
        self._stream.synchronize()

    def _load(self, name: str, request: DocumentRequest, blocks: Sequence[int], begin: int) -> None:
        every = range(self.num_layers)
        with ExitStack() as stack:
            documents = self._open(request, stack)
            if request.method is None:
                wanted = torch.arange(request.end) >= begin
                layout = Layout.whole(request.end, len(blocks), self.page_size)
            else:
                context = self.method(request).question_context(self.placed(request, documents))
                self._held[name] = stack.pop_all(), documents
                if context is None:
                    return
                wanted = kept_positions(request, context)
                layout = Layout.of(wanted, len(blocks), self.page_size)
            self.write(request, documents, [wanted for _ in every], [layout for _ in every], blocks)

    def _open(self, request: DocumentRequest, stack: ExitStack) -> list[StoredDocument]:
        """The request's documents, in order; one that occurs twice is opened once."""
        known: dict[str, StoredDocument] = {}
        for name, digest in zip(request.names, request.digests, strict=True):
            if digest not in known:
                known[digest] = stack.enter_context(self._lookup.open(name, digest))
        return [known[digest] for digest in request.digests]

    def documents(self, name: str) -> list[StoredDocument]:
        """The documents of a request that has not chosen yet."""
        return self._held[name][1]

    def close(self, name: str) -> None:
        """Closes a request's documents, if any are open."""
        if name in self._held:
            self._held.pop(name)[0].close()

    def method(self, request: DocumentRequest) -> Reuse:
        """The reuse method that chooses."""
        assert request.method is not None, "this request keeps everything"
        return make_reuse(request.method).resolve(self._facts.geometry)

    def placed(
        self, request: DocumentRequest, documents: Sequence[StoredDocument]
    ) -> list[PlacedDocument]:
        """The documents as a method sees them, with statistics of all heads."""
        return placed(documents, request.offsets, self._shift.shift if request.shifted else None)

    def write(
        self,
        request: DocumentRequest,
        documents: Sequence[StoredDocument],
        wanted: Sequence[Tensor],
        layouts: Sequence[Layout],
        blocks: Sequence[int],
    ) -> None:
        """Writes the wanted tokens, bool [end] per layer, to the slots that the layer's layout
        gives.
        """
        table = torch.tensor(blocks, dtype=torch.int64)
        for document, offset in zip(documents, request.offsets, strict=True):
            by = offset if request.shifted else 0
            for number in range(self.num_layers):
                own = wanted[number][offset : offset + document.length].numpy()
                edges = np.flatnonzero(np.diff(own, prepend=False, append=False))
                for first, last in edges.reshape(-1, 2).tolist():
                    for start in range(first, last, _PIECE):
                        stop = min(last, start + _PIECE)
                        positions = torch.arange(offset + start, offset + stop)
                        slots = layouts[number].slots(positions, table).to(self._device)
                        self._put(document, number, start, stop, by, slots)

    def _put(
        self, document: StoredDocument, number: int, start: int, stop: int, by: int, slots: Tensor
    ) -> None:
        """Copies rows of a document to slots of a layer."""
        keys, values = document.rows(number, start, stop)
        assert values is not None, "models with latent attention are refused"
        layer, heads = self._layers[number], self._heads[number]
        key = self._shift.shift(number, keys[:, heads].to(self._device), by).contiguous()
        value = values[:, heads].to(self._device).contiguous()
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)


def kept_positions(request: DocumentRequest, kept: Tensor) -> Tensor:
    """The tokens before the question that are kept, bool [end]; kept: bool [T], of documents."""
    found = torch.ones(request.end, dtype=torch.bool)
    parts = kept.split(request.lengths)
    for offset, part in zip(request.offsets, parts, strict=True):
        found[offset : offset + len(part)] = part
    return found

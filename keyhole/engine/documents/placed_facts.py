"""Statistics of stored documents at their places in a prompt, as reuse methods read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from keyhole.documents.store import StoredDocument
from keyhole.models.positions import RopeShift
from keyhole.reuse.base import LayerFacts, PlacedDocument

_T = TypeVar("_T")


class PlacedFacts:
    """The facts of one prompt's documents; a layer's are read and rotated when asked for.

    offsets: position of each document's first token. shift: None if keys stay as they were stored.
    """

    def __init__(
        self,
        documents: Sequence[StoredDocument],
        offsets: Sequence[int],
        num_layers: int,
        shift: RopeShift | None,
    ) -> None:
        self._documents, self._offsets = documents, offsets
        self._num_layers, self._shift = num_layers, shift
        self._known: dict[int, list[LayerFacts]] = {}
        self._extremes: dict[int, list[Tensor]] = {}

    def documents(self) -> list[PlacedDocument]:
        """The documents as a reuse method sees them, on the CPU."""
        return [
            PlacedDocument(
                name=document.info.name,
                length=document.length,
                offset=offset,
                block_size=document.block_size,
                layers=_Lazy(partial(self._facts_of, i), self._num_layers),
                extremes=_Lazy(partial(self._extremes_of, i), self._num_layers),
            )
            for i, (document, offset) in enumerate(zip(self._documents, self._offsets, strict=True))
        ]

    def read(self, layer: int) -> list[LayerFacts]:
        """The facts of one layer, per document; all keys are shifted at once."""
        if layer not in self._known:
            stored = [document.statistics(layer) for document in self._documents]
            counts = [len(facts.alpha) for facts in stored]
            offsets = np.asarray(self._offsets, np.int64)
            by = torch.from_numpy(np.repeat(offsets, counts))[:, None]

            def shifted(parts: list[Tensor]) -> tuple[Tensor, ...]:
                joined = torch.cat([part.float() for part in parts])
                if self._shift is not None:
                    joined = self._shift.shift(layer, joined, by)
                return tuple(joined.split(counts))

            keys = shifted([facts.block_keys for facts in stored])
            queries = shifted([facts.block_queries for facts in stored])
            representatives = shifted([facts.representative_keys for facts in stored])
            self._known[layer] = [
                LayerFacts(
                    block_keys=keys[i],
                    block_queries=queries[i],
                    representatives=facts.representatives,
                    representative_keys=representatives[i],
                    alpha=facts.alpha,
                    received=facts.received,
                )
                for i, facts in enumerate(stored)
            ]
        return self._known[layer]

    def _facts_of(self, index: int, layer: int) -> LayerFacts:
        return self.read(layer)[index]

    def _extremes_of(self, index: int, layer: int) -> Tensor:
        """Extreme keys of a document in a layer, shifted; what is stored is read at once."""
        if index not in self._extremes:
            self._extremes[index] = self._documents[index].extreme_keys()
        # Turned ones are not kept: they are used once, and those of all layers would be many.
        stored = self._extremes[index][layer].float()
        if self._shift is None:
            return stored
        return self._shift.shift(layer, stored, self._offsets[index])


class _Lazy(Sequence[_T]):
    """The data of a document by layer, read on access."""

    def __init__(self, read: Callable[[int], _T], num_layers: int) -> None:
        self._read = read
        self._num_layers = num_layers

    def __len__(self) -> int:
        return self._num_layers

    def __getitem__(self, layer: int) -> _T:  # type: ignore[override]
        if not -self._num_layers <= layer < self._num_layers:
            raise IndexError(layer)
        return self._read(layer % self._num_layers)

"""Stored documents at their places in a prompt, as reuse methods see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

from torch import Tensor

from keyhole.documents.store import StoredDocument
from keyhole.reuse.base import PlacedDocument, Shift

_T = TypeVar("_T")


def placed(
    documents: Sequence[StoredDocument], offsets: Sequence[int], shift: Shift | None
) -> list[PlacedDocument]:
    """The documents of one prompt; their statistics are in memory, extreme keys are read on access.

    offsets: position of each document's first token. shift: None if keys stay as they were stored.
    """
    return [
        PlacedDocument(
            name=document.info.name,
            length=document.length,
            offset=offset,
            block_size=document.block_size,
            layers=_ByLayer(document.statistics, document.num_layers),
            extremes=_ByLayer(_extremes(document), document.num_layers),
            shift=shift,
        )
        for document, offset in zip(documents, offsets, strict=True)
    ]


def _extremes(document: StoredDocument) -> Callable[[int], Tensor]:
    """The extreme keys of a layer; those of all layers are read at the first call."""
    read = cache(document.extreme_keys)
    return lambda layer: read()[layer]


class _ByLayer(Sequence[_T]):
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

"""A prompt made of stored documents: what stands where, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from keyhole.documents.store import StoredDocument
from keyhole.reuse.base import Reuse


@dataclass(frozen=True, eq=False)
class Context:
    """What stands before the question: a prefix, documents, and what separates them.

    offsets: position of each document's first token. end: position of the question's first token.
    num_prefix: tokens of the prefix.
    """

    documents: tuple[StoredDocument, ...]
    offsets: tuple[int, ...]
    end: int
    num_prefix: int
    reuse: Reuse

    @property
    def positions(self) -> np.ndarray:
        """Positions of all tokens of the documents, in order: int64 [T]."""
        parts = [
            np.arange(offset, offset + document.length)
            for document, offset in zip(self.documents, self.offsets, strict=True)
        ]
        return np.concatenate(parts).astype(np.int64)

    @property
    def separators(self) -> np.ndarray:
        """Positions that belong neither to the prefix nor to a document: int64."""
        rest = np.arange(self.num_prefix, self.end)
        return rest[~np.isin(rest, self.positions)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Reused:
    """What a prompt took from the store.

    documents: their names, in order. lengths: tokens of each. shares: SamKV's P of each, None for
    other methods. sequence_ratio: kept tokens / tokens of the documents, mean over layers.
    recompute_ratio: those computed again in some layer / all. tokens_not_computed: the others.
    bytes_read: from the store, block statistics included. kept: bool [L, T], what each layer keeps
    of all tokens of documents. written: bool [L, T], what each layer computed again of these.
    """

    documents: Sequence[str]
    lengths: Sequence[int]
    shares: tuple[float, ...] | None
    sequence_ratio: float
    recompute_ratio: float
    tokens_not_computed: int
    bytes_read: int
    kept: Tensor
    written: Tensor

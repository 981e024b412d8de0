"""Documents at their places in a prompt, with facts drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from keyhole.documents.record import LayerStatistics
from keyhole.reuse.base import PlacedDocument


def make_documents(
    lengths: Sequence[int],
    *,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 8,
    block_size: int = 4,
    first: int = 5,
    seed: int = 0,
) -> list[PlacedDocument]:
    """Documents of these lengths, one after the other, the first at position `first`."""
    rng = torch.Generator().manual_seed(seed)
    others = torch.Generator().manual_seed(seed + 1)
    documents: list[PlacedDocument] = []
    for name, length in enumerate(lengths):
        starts = torch.arange(0, length, block_size)
        number = len(starts)
        facts = []
        for _ in range(layers):
            # Any token of the block, the last block being shorter.
            place = torch.rand(number, generator=rng) * (length - starts).clamp(max=block_size)
            facts.append(
                LayerStatistics(
                    block_keys=torch.randn(number, kv_heads, size, generator=rng),
                    local_queries=torch.randn(number, heads, size, generator=rng),
                    representatives=starts + place.long(),
                    representative_keys=torch.randn(number, kv_heads, size, generator=rng),
                    alpha=torch.randn(number, generator=rng),
                    received=torch.rand(number, generator=rng),
                )
            )
        extremes = torch.randn(layers, number, 2, kv_heads, size, generator=others)
        documents.append(
            PlacedDocument(str(name), length, first, block_size, facts, tuple(extremes))
        )
        first += length
    return documents


def make_query(
    layers: int = 3, heads: int = 4, size: int = 8, seed: int = 100
) -> list[torch.Tensor]:
    """The question's mean query in each layer."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(heads, size, generator=rng) for _ in range(layers)]


def make_queries(tokens: int, layers: int = 3, seed: int = 100) -> list[torch.Tensor]:
    """The queries of all of the question's tokens in each layer."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, 4, 8, generator=rng) for _ in range(layers)]


def with_fact(document: PlacedDocument, layer: int, **facts: torch.Tensor) -> PlacedDocument:
    """The document with some facts of one layer replaced."""
    layers = list(document.layers)
    layers[layer] = replace(layers[layer], **facts)
    return replace(document, layers=layers)

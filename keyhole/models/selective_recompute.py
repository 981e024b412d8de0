"""One layer's attention for recomputed tokens, at any positions of a sequence.

SamKV (arXiv 2508.11661, section 3.3): a token that is recomputed in some layers runs through all of
them; in the others it uses the stored keys and values and writes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keyhole import kernels
from keyhole.models.batch import Batch, ScatteredChunk


def write(
    batch: Batch, chunk: ScatteredChunk, layer: int, new: tuple[Tensor, Tensor | None]
) -> None:
    """Writes new keys and values [T, Hkv, D] at the chunk's positions, in this layer.

    The pages hold the old ones until then.
    """
    if chunk.deviations is not None and layer in chunk.deviations:
        chunk.deviations[layer].append(_deviation(batch, chunk, layer, new))
    if chunk.written is None:
        _put(batch, chunk, layer, slice(None), new)
        return
    if chunk.fused is not None:
        fused = chunk.fused[layer]
        _put(batch, chunk, layer, fused, _updated(batch, chunk, layer, fused, new))
    rows = chunk.written[layer]
    _put(batch, chunk, layer, rows, _rows(new, rows))


def attend(
    batch: Batch,
    chunk: ScatteredChunk,
    layer: int,
    query: Tensor,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention of the chunk's queries [T, Hq, D] over the layer's tokens, [T, Hq, Dv]."""
    if chunk.queries is not None:
        chunk.queries(layer, query)
    paged = query, batch.cache.keys[layer], batch.cache.values[layer]
    seen, end = chunk.seen[layer], chunk.start + len(query)
    if chunk.unbroken and len(seen) == end and chunk.places is None:
        pages = chunk.pages[: -(-end // batch.cache.page_size)]
        return kernels.prefill(*paged, pages, chunk.start, window=window, **options)
    return kernels.sparse_prefill(
        *paged, chunk.pages, chunk.places_in(layer), seen, window=window, **options
    )


def _deviation(
    batch: Batch, chunk: ScatteredChunk, layer: int, new: tuple[Tensor, Tensor | None]
) -> Tensor:
    """|new - stored|^2 of keys and of values, summed over heads and numbers: float32 [2, T]."""
    key, value = new
    pages = batch.cache.keys[layer], batch.cache.values[layer]
    if value is None:  # MLA: values are computed from the latent, the first part of the key
        value = key[..., : pages[1].shape[-1]]
    found = []
    for part, stored in zip((key, value), pages, strict=True):
        old = kernels.gather_tokens(stored, chunk.pages, chunk.places_in(layer))
        found.append((part.float() - old.float()).square().flatten(1).sum(1))
    return torch.stack(found)


def _updated(
    batch: Batch,
    chunk: ScatteredChunk,
    layer: int,
    rows: Tensor,
    new: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """New keys and values of some rows, combined with the stored ones."""
    assert chunk.update is not None
    tokens = chunk.places_in(layer)[rows]
    pages = batch.cache.keys[layer], batch.cache.values[layer]
    found = [
        None
        if part is None
        else chunk.update(part, kernels.gather_tokens(old, chunk.pages, tokens))
        for part, old in zip(_rows(new, rows), pages, strict=True)
    ]
    assert found[0] is not None
    return found[0], found[1]


def _rows(new: tuple[Tensor, Tensor | None], rows: Tensor) -> tuple[Tensor, Tensor | None]:
    return new[0][rows], None if new[1] is None else new[1][rows]


def _put(
    batch: Batch,
    chunk: ScatteredChunk,
    layer: int,
    rows: Tensor | slice,
    new: tuple[Tensor, Tensor | None],
) -> None:
    if chunk.places is None:
        slots = batch.slots[chunk.rows][rows]
    else:
        places, size = chunk.places[layer][rows], batch.cache.page_size
        slots = chunk.pages[places // size] * size + places % size
    values = None if new[1] is None else batch.cache.values[layer]
    kernels.append(batch.cache.keys[layer], values, new[0], new[1], slots)

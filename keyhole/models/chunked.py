"""Chunked attention: a token reads the tokens of its own chunk of positions (Llama 4).

With chunks of c tokens the token at position p reads floor(p / c) c .. p. Keys are rotated already,
so a chunk is attended to as a sequence of its own whose first page is the chunk's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keyhole import kernels
from keyhole.kernels.selection import Selection
from keyhole.models.batch import Batch, Chunk


def newest(lengths: Tensor, chunk: int) -> Selection:
    """The tokens that the newest token of each sequence reads; lengths int32 [B]."""
    start = torch.div(lengths - 1, chunk, rounding_mode="floor") * chunk
    indices = start[:, None] + torch.arange(chunk, device=lengths.device, dtype=lengths.dtype)
    indices = indices.masked_fill(indices >= lengths[:, None], -1)
    counts = (lengths - start).to(torch.int32)
    return Selection(indices[:, None].to(torch.int32), counts[:, None], unit=1)


def prefill(
    batch: Batch, chunk: Chunk, layer: int, query: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention of prompt tokens, query [T, Hq, D]; a call for each chunk of positions."""
    cache = batch.cache
    size = cache.geometry.layers[layer].window
    assert size is not None
    parts = []
    begin, end = chunk.start, chunk.start + len(query)
    while begin < end:
        first = begin // size * size
        stop = min(first + size, end)
        rows = query[begin - chunk.start : stop - chunk.start]
        pages = chunk.pages[first // cache.page_size : -(-stop // cache.page_size)]
        paged = (cache.keys[layer], cache.values[layer], pages, begin - first)
        parts.append(kernels.prefill(rows, *paged, **options))
        begin = stop
    return torch.cat(parts)

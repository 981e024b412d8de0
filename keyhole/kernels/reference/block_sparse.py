"""Attention of a prompt's tokens over selected blocks of the tokens before them."""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.kernels.reference import attention
from keyhole.kernels.reference.pages import gathered
from keyhole.kernels.reference.quantised import dequantised
from keyhole.kernels.selection import Selection


def block_sparse_prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    start: int,
    *,
    blocks: Selection,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one sequence's tokens start .. start + T - 1 over blocks of its pages.

    query [T, Hq, D]; pages int64 [M], softcap and sinks as in `prefill`. blocks: what each block of
    `unit` positions reads that has some of these tokens, R of them in order: indices [R, Hq, n],
    blocks of `unit` positions for each query head, its own block among them. A token does not read
    later ones. Returns [T, Hq, Dv] in query's dtype.
    """
    end, size = start + len(query), blocks.unit
    key, value = (
        dequantised(gathered(x, (pages[: -(-end // key_pages.shape[2])],), query.device))
        .to(query.dtype)
        .transpose(0, 1)
        .flatten(1, 2)[:, :end]
        for x in (key_pages, value_pages)
    )
    grouped = query.unflatten(1, (key.shape[0], -1)).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
    position = torch.arange(end, device=query.device)
    most = max(1, attention.MAX_SCORES // (query.shape[1] * end))
    parts = []
    for row, read in enumerate(_read(blocks, -(-end // size))):
        of_head = read.repeat_interleave(size, 1)[:, :end].unflatten(0, grouped.shape[:2])
        block = start // size + row
        for begin in range(max(start, block * size), min(end, (block + 1) * size), most):
            own = position[begin : min(begin + most, end, (block + 1) * size)]
            seen = of_head[:, :, None] & (position <= own[:, None])
            part = grouped[:, :, own[0] - start : own[-1] + 1 - start]
            mixed = attention.attend_block(part, key, value, seen, scale, softcap, sinks)
            parts.append(mixed.to(query.dtype))
    return torch.cat(parts, 2).permute(2, 0, 1, 3).flatten(1, 2)


def _read(blocks: Selection, count: int) -> Tensor:
    """Which of `count` blocks are read, bool [R, Hq, count]."""
    indices = blocks.indices.long()
    listed = indices.masked_fill(indices < 0, count)
    read = torch.zeros(*indices.shape[:2], count + 1, dtype=torch.bool, device=indices.device)
    return read.scatter_(2, listed, True)[..., :count]

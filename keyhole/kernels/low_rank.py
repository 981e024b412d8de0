"""Keys of low rank, rebuilt where they are read (ShadowKV), and attention over keys that are not in
pages.

Plain PyTorch on every device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from keyhole.kernels.chosen import gather_tokens
from keyhole.kernels.selection import Selection

# Keys in float64 at a time: 64 MiB for keys of 1024 numbers.
_ROWS = 8192


def low_rank(keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of keys [n, d] by `rank` numbers each: K ~ coefficients @ basis.

    Coefficients float32 [n, rank] and basis [rank, d], rank <= d: U S and V^T of the truncated
    singular value decomposition. V is found from the d x d matrix K^T K, as n is far larger.
    """
    keys = keys.float()
    # float64, as squaring halves the digits; ascending, so that the last columns are the largest.
    squares = sum(part.T.double() @ part.double() for part in keys.split(_ROWS))
    basis = torch.linalg.eigh(squares).eigenvectors[:, -rank:].flip(1).T.float()
    return keys @ basis.T, basis


def decompose(
    key_pages: Tensor,
    coefficients: Tensor,
    pages: Tensor,
    length: int,
    turn: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Puts the first `length` keys of a sequence, before RoPE, into low rank.

    key_pages [P, Hkv, page_size, D], coefficients [P, page_size, rank], written in place; pages
    int64 [M], the sequence's pages in order; turn(x, by): x [..., D] rotated by so many positions.
    Returns the basis, float32 [rank, Hkv, D].
    """
    size, token = coefficients.shape[1], torch.arange(length, device=pages.device)
    keys = turn(gather_tokens(key_pages, pages, token), -token[:, None])
    numbers, basis = low_rank(keys.flatten(1), coefficients.shape[2])
    coefficients[pages[token // size], token % size] = numbers.to(coefficients.dtype)
    return basis.view(-1, *keys.shape[1:])


def rebuilt_keys(
    coefficients: Tensor, basis: Tensor, page_table: Tensor, selection: Selection
) -> Tensor:
    """Keys of selected tokens from their coefficients, [B, Hkv, n, D] in the basis' dtype.

    coefficients [P, page_size, rank], shared by all heads; basis [B, rank, Hkv, D]; page_table
    int32 [B, M]; selection: tokens, [B, Hkv, n].
    """
    size = coefficients.shape[1]
    tokens = selection.indices.long().clamp(min=0)
    page = page_table.long()[:, None].expand(-1, tokens.shape[1], -1).gather(2, tokens // size)
    return coefficients[page, tokens % size] @ basis.transpose(1, 2)


def gather_selected(pages_of: Tensor, page_table: Tensor, selection: Selection) -> Tensor:
    """Keys or values of selected tokens, a copy [B, Hkv, n, D]; where there is none, anything.

    pages_of [P, Hkv, page_size, D]; page_table int32 [B, M]; selection: tokens.
    """
    heads, size = pages_of.shape[1:3]
    tokens = selection.indices.long().clamp(min=0).expand(-1, heads, -1)
    page = page_table.long()[:, None].expand(-1, heads, -1).gather(2, tokens // size)
    head = torch.arange(heads, device=tokens.device)[:, None]
    return pages_of[page, head, tokens % size]


def own_pages(selection: Selection) -> tuple[Tensor, Tensor, Selection]:
    """Page table, lengths and selection that read [B, H, n, D] as pages, one per sequence.

    For keys and values that were gathered in the order of `selection`.
    """
    counts = selection.counts
    width = selection.indices.shape[2]
    place = torch.arange(width, dtype=torch.int32, device=counts.device)
    indices = place.expand_as(selection.indices).masked_fill(selection.indices < 0, -1)
    table = torch.arange(len(counts), dtype=torch.int32, device=counts.device)[:, None]
    lengths = torch.full_like(counts[:, 0], width)
    return table, lengths, Selection(indices.contiguous(), counts.contiguous(), 1)

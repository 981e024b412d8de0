"""Keys of low rank (ShadowKV): how they are found, and attention that rebuilds them as it reads.

Plain PyTorch; on a CPU our C++ extension attends.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keyhole.kernels import reference
from keyhole.kernels.composite.gathered_attention import gather_tokens
from keyhole.kernels.composite.rope import Rotation, shift_rope

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
    rotation: Rotation,
) -> Tensor:
    """Puts the first `length` keys of a sequence, before RoPE, into low rank.

    key_pages [P, Hkv, page_size, D], coefficients [P, page_size, rank], written in place; pages
    int64 [M], the sequence's pages in order. Returns the basis, float32 [rank, Hkv, D].
    """
    size, token = coefficients.shape[1], torch.arange(length, device=pages.device)
    keys = rotation.turn(gather_tokens(key_pages, pages, token), -token[:, None])
    numbers, basis = low_rank(keys.flatten(1), coefficients.shape[2])
    coefficients[pages[token // size], token % size] = numbers.to(coefficients.dtype)
    return basis.view(-1, *keys.shape[1:])


def attend_low_rank(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    indices: Tensor,
    counts: Tensor,
    coefficients: Tensor,
    basis: Tensor,
    first: Tensor,
    taken: Tensor,
    chunk: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    frequencies: Tensor | None,
    last: bool,
) -> Tensor:
    """One query token per sequence over some tokens, by keys of low rank, [B, Hq, Dv].

    As `attend`, the selection of tokens per KV head in parts; of `LowRank`, what it has.
    """
    heads = key_pages.shape[1]
    tokens = indices.clamp(min=0)
    shared = coefficients[:, None].expand(-1, heads, -1, -1)
    keys = _gathered(shared, page_table, tokens) @ basis.transpose(1, 2)
    if frequencies is not None:
        keys = shift_rope(keys, tokens.long(), frequencies, last)
    listed = reference.members(taken, page_table.shape[1] * key_pages.shape[2] // chunk)
    own = listed.gather(2, tokens.long() // chunk) | (tokens >= first[:, None, None])
    keys = _gathered(key_pages, page_table, tokens).where(own[..., None], keys)
    values = _gathered(value_pages, page_table, tokens)
    # What was gathered, in the order of the selection, as pages, one per sequence.
    place = torch.arange(indices.shape[2], dtype=torch.int32, device=indices.device)
    places = place.expand_as(indices).masked_fill(indices < 0, -1).contiguous()
    table = torch.arange(len(query), dtype=torch.int32, device=indices.device)[:, None]
    paged = (query, keys, values, table, torch.full_like(lengths, indices.shape[2]))
    chosen = (places, counts.contiguous(), 1)
    out: Tensor = torch.ops.keyhole.attend(*paged, *chosen, scale, None, softcap, sinks)
    return out


def _gathered(pages_of: Tensor, page_table: Tensor, tokens: Tensor) -> Tensor:
    """Keys or values of tokens [B, Hkv, n], a copy [B, Hkv, n, D].

    pages_of [P, Hkv, page_size, D]; page_table int32 [B, M]. To take lines of one dimension is
    several times as fast as to index three.
    """
    _, heads, size, dim = pages_of.shape
    *steps, inner = pages_of.stride()
    # Lines may overlap: a page's values follow its keys, and MLA's values are a part of the keys.
    step = max(1, math.gcd(*steps))
    page_step, head_step, token_step = (one // step for one in steps)
    count = (len(pages_of) - 1) * page_step + (heads - 1) * head_step + (size - 1) * token_step + 1
    lines = pages_of.as_strided((count, dim), (step, inner))
    page = page_table.long()[:, None].expand(-1, heads, -1).gather(2, (tokens // size).long())
    head = torch.arange(heads, device=tokens.device)[:, None] * head_step
    numbers = page * page_step + head + tokens % size * token_step
    return lines.index_select(0, numbers.flatten()).view(*tokens.shape, -1)

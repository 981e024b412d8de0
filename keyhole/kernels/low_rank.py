"""Keys of low rank, rebuilt where they are read (ShadowKV), and attention over keys that are not in
pages.

Plain PyTorch on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from keyhole.kernels import reference
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
    key_pages: Tensor,
    coefficients: Tensor,
    basis: Tensor,
    page_table: Tensor,
    selection: Selection,
    turn: Callable[[Tensor, Tensor], Tensor],
    *,
    own: Tensor,
    taken: Tensor,
    chunk: int,
    most: int,
) -> Tensor:
    """Keys of selected tokens [B, Hkv, n, D], rebuilt from their coefficients and turned.

    As they are in key_pages [P, Hkv, page_size, D]: those of tokens that are `own`, bool
    [B, Hkv, n], or in chunks that are `taken`, int32 [B, Hkv, k], padded with -1. coefficients
    [P, page_size, rank], shared by all heads; basis [B, rank, Hkv, D], both of the keys' dtype;
    page_table int32 [B, M]; selection: tokens, [B, Hkv, n], whole chunks of `chunk`, and after
    the first that is not whole the tokens that follow it, which are own. turn as in `decompose`.
    most: in how many chunks of a selection keys are rebuilt, at most.
    """
    tokens = selection.indices
    heads, width = tokens.shape[1:]
    run = 1 if width % chunk else chunk
    chunks = page_table.shape[1] * key_pages.shape[2] // chunk
    listed = reference.members(taken, chunks)
    theirs = listed.gather(2, tokens[..., ::run].long().clamp(min=0) // chunk)
    own = own | theirs.repeat_interleave(run, 2) | (tokens < 0)
    places = _places(own, chunk, most)
    some = tokens.gather(2, places)
    shared = coefficients[:, None].expand(-1, heads, -1, -1)
    found = _taken(*_lines(shared, page_table, some, chunk), some) @ basis.transpose(1, 2)
    found = turn(found, some.long())
    # Where keys stay as they are, what was rebuilt goes to one more line, which nobody reads.
    count, dim = tokens.numel(), key_pages.shape[3]
    keys = key_pages.new_empty(count + 1, dim)
    lines, numbers = _lines(key_pages, page_table, tokens, run)
    torch.index_select(lines, 0, numbers.flatten(), out=keys[:count].view(-1, lines.shape[1]))
    first = torch.arange(0, count, width, device=places.device).view(-1, heads, 1)
    target = (places + first).masked_fill(own.gather(2, places), count)
    keys.index_copy_(0, target.flatten(), found.flatten(0, 2))
    return keys[:count].view(-1, heads, width, dim)


def _places(own: Tensor, chunk: int, most: int) -> Tensor:
    """Places in selections of `most` chunks each, int64 [B, H, most * chunk].

    own bool [B, H, n]. Those chunks come first that are not wholly own.
    """
    count = own.shape[2] // chunk
    whole = own[..., : count * chunk].unflatten(2, (count, chunk)).all(-1)
    some = whole.to(torch.uint8).sort(dim=-1, stable=True).indices[..., :most, None]
    places: Tensor = some * chunk + torch.arange(chunk, device=own.device)
    return places.flatten(2)


def gather_selected(pages_of: Tensor, page_table: Tensor, selection: Selection) -> Tensor:
    """Keys or values of selected tokens, a copy [B, Hkv, n, D]; where there is none, anything.

    pages_of [P, Hkv, page_size, D]; page_table int32 [B, M]; selection: tokens.
    """
    tokens = selection.indices.expand(-1, pages_of.shape[1], -1)
    return _taken(*_lines(pages_of, page_table, tokens), tokens)


def _lines(
    pages_of: Tensor, page_table: Tensor, tokens: Tensor, run: int = 1
) -> tuple[Tensor, Tensor]:
    """A view [lines, run * D] that has the numbers of every run of tokens in some line, and which.

    pages_of [P, Hkv, page_size, D]; tokens [B, Hkv, n], token 0 where there is none; a run begins
    at a multiple of its length. Int64 [B, Hkv, n / run]. To take lines of one dimension is several
    times as fast as to index three.
    """
    _, heads, size, dim = pages_of.shape
    *steps, inner = pages_of.stride()
    assert run == 1 or (inner == 1 and steps[2] == dim), "the tokens of a page stand in a row"
    # Lines may overlap: a page's values follow its keys, and MLA's values are a part of the keys.
    step = max(1, math.gcd(*steps))
    page_step, head_step, token_step = (one // step for one in steps)
    last = (len(pages_of) - 1) * page_step + (heads - 1) * head_step + (size - run) * token_step
    lines = pages_of.as_strided((last + 1, run * dim), (step, inner))
    tokens = tokens[..., ::run].clamp(min=0)
    # Where token 0 of the text would be, were its pages all like the one that a token is in.
    place = torch.arange(page_table.shape[1], device=tokens.device)
    begin = page_table.long() * page_step - place * (size * token_step)
    begin = begin[:, None].expand(-1, heads, -1).gather(2, (tokens // size).long())
    head = torch.arange(heads, device=tokens.device)[:, None] * head_step
    return lines, begin + head + tokens * token_step


def _taken(lines: Tensor, numbers: Tensor, tokens: Tensor) -> Tensor:
    """Those lines for tokens [B, Hkv, n], [B, Hkv, n, D]."""
    return lines.index_select(0, numbers.flatten()).view(*tokens.shape, -1)


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

"""Attention on a CPU by our C++ extension, for decode steps and prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from keyhole.kernels import cpu, reference
from keyhole.kernels.reference.layers import angles_below
from keyhole.kernels.reference.quantised import is_quantised, row_dim
from keyhole.kernels.selection import LowRank, PagedQuery, ScoreRequest, Selection

# Sizes (rank, chunks taken, tokens of a chunk), addresses, angles: as in `attend_low_rank`.
_NO_LOW_RANK = ((0, 0, 1), (0, 0, 0, 0), (0, 0, 0))


def attend(
    paged: PagedQuery,
    *,
    scale: float,
    selection: Selection | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference."""
    out = _room_for(paged)
    _attend(paged, scale, softcap, sinks, selection=selection, window=window, out=out)
    return out.to(paged[0].dtype)


def attend_low_rank(
    paged: PagedQuery,
    *,
    selection: Selection,
    low_rank: LowRank,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference, but keys stay float32 throughout and are never all materialized."""
    query, key_pages, value_pages, page_table, _ = paged
    assert low_rank.coefficients.is_contiguous()  # the cache allocates them contiguous
    # Kept in variables: a copy referenced by its address only would be freed at once.
    basis, first = low_rank.basis.contiguous(), cpu.as_int32(low_rank.first)
    taken, heads = cpu.as_int32(low_rank.taken), key_pages.shape[1]
    pairs, angles = 0, None
    if low_rank.frequencies is not None:
        pairs = len(low_rank.frequencies)
        tokens = page_table.shape[1] * key_pages.shape[2]
        angles = angles_below(tokens, low_rank.frequencies)
    parts = (
        (low_rank.coefficients.shape[2], taken.shape[2], low_rank.chunk),
        tuple(x.data_ptr() for x in (low_rank.coefficients, basis, first, taken)),
        (cpu.address(angles), pairs, key_pages.shape[3] - 2 * pairs if low_rank.last else 0),
    )
    lists = selection.indices.expand(-1, heads, -1), selection.counts.expand(-1, heads)
    chosen = Selection(*lists, selection.unit)
    out = query.new_empty(*query.shape[:2], value_pages.shape[-1])
    _attend(paged, scale, softcap, sinks, selection=chosen, low_rank=parts, out=out)
    return out


def attend_and_score(
    paged: PagedQuery,
    *,
    requests: tuple[ScoreRequest, ...],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As the reference, which computes scores of every query head."""
    query, key_pages, _, page_table, _ = paged
    if any(request.reduce == "none" for request in requests):
        return reference.attend_and_score(
            paged, requests=requests, scale=scale, softcap=softcap, sinks=sinks
        )
    tokens = page_table.shape[1] * key_pages.shape[2]
    out = _room_for(paged)
    scores, wanted, weights = [], [], None
    for request in requests:
        if request.reduce == "group_max":  # the result of `head_scores`, from the same pass
            if weights is None:
                weights = torch.empty(len(query), key_pages.shape[1], tokens, dtype=torch.float32)
            scores.append(weights)
        else:
            shape = len(query), 1, tokens // request.unit
            scores.append(torch.empty(shape, dtype=torch.float32))
            wanted.append((request.reduce == "sum", request.unit, scores[-1].data_ptr()))
    _attend(paged, scale, softcap, sinks, requests=wanted, weights=weights, out=out)
    pooled = (
        score.unflatten(2, (-1, request.unit)).sum(3)
        if request.reduce == "group_max" and request.unit > 1
        else score
        for score, request in zip(scores, requests, strict=True)
    )
    return out.to(query.dtype), tuple(pooled)


def _room_for(paged: PagedQuery) -> Tensor:
    """Where the extension writes values: float32 if they are quantised, else in query's dtype."""
    query, _, value_pages, _, _ = paged
    dtype = torch.float32 if is_quantised(value_pages) else query.dtype
    return query.new_empty(*query.shape[:2], row_dim(value_pages), dtype=dtype)


def head_scores(
    query: Tensor, key_pages: Tensor, page_table: Tensor, lengths: Tensor, *, scale: float
) -> Tensor:
    """As the reference."""
    tokens = page_table.shape[1] * key_pages.shape[2]
    out = torch.empty(len(query), key_pages.shape[1], tokens, dtype=torch.float32)
    paged = PagedQuery(query, key_pages, key_pages, page_table, lengths)
    _attend(paged, scale, None, None, weights=out)
    return out


def _attend(
    paged: PagedQuery,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    *,
    selection: Selection | None = None,
    window: int | None = None,
    requests: Sequence[tuple[bool, int, int]] = (),
    low_rank: tuple[tuple[int, ...], ...] = _NO_LOW_RANK,
    weights: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Computes all of the above. requests: sum or maximum, unit, and where the scores go.

    weights: receives `head_scores`; out: receives the attended values.
    """
    query, key_pages, value_pages, page_table, lengths = paged
    rounded = query.dtype.itemsize == 2
    query = query.float() if is_quantised(key_pages) else query
    query, page_table, lengths = query.contiguous(), cpu.as_rows(page_table), cpu.as_int32(lengths)
    indices, counts, listed = None, None, (1, 0, 1)
    if selection is not None:
        indices, counts = cpu.as_int32(selection.indices), cpu.as_int32(selection.counts)
        listed = (*indices.shape[1:], selection.unit)
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    num_rows, num_heads, dim = query.shape
    _, num_kv_heads, page_size, _ = value_pages.shape
    cpu.extension.attend(
        cpu.PAGE_DTYPES[key_pages.dtype],
        rounded,
        (num_rows, num_heads, num_kv_heads, dim, row_dim(value_pages), page_size),
        query.data_ptr(),
        key_pages.data_ptr(),
        cpu.key_strides(key_pages),
        value_pages.data_ptr(),
        value_pages.stride()[:3],
        page_table.data_ptr(),
        page_table.stride(0),
        page_table.shape[1],
        lengths.data_ptr(),
        cpu.address(indices),
        cpu.address(counts),
        listed,
        window or 0,
        scale,
        softcap or 0.0,
        cpu.address(sinks),
        requests,
        *low_rank,
        cpu.address(weights),
        cpu.address(out),
    )


def prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference."""
    pages = pages[: -(-(start + len(query)) // key_pages.shape[2])]
    paged = (query, key_pages, value_pages, pages)
    which = (window or 0, (0, 0, 0))
    return _prefill(cpu.extension.prefill, paged, start, which, scale, softcap, sinks)


def sparse_prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    positions: Tensor,
    tokens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference."""
    positions, tokens = positions.to(torch.int64).contiguous(), cpu.as_int32(tokens)
    which = (window or 0, (positions.data_ptr(), tokens.data_ptr(), len(tokens)))
    paged = (query, key_pages, value_pages, pages)
    return _prefill(cpu.extension.prefill, paged, 0, which, scale, softcap, sinks)


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
    """As the reference."""
    indices, counts = cpu.as_int32(blocks.indices), cpu.as_int32(blocks.counts)
    which = ((indices.data_ptr(), counts.data_ptr(), indices.shape[2], blocks.unit),)
    paged = (query, key_pages, value_pages, pages)
    kernel = cpu.extension.block_sparse_prefill
    return _prefill(kernel, paged, start, which, scale, softcap, sinks)


def _prefill(
    kernel: Callable[..., None],
    paged: tuple[Tensor, Tensor, Tensor, Tensor],
    start: int,
    which: tuple[Any, ...],
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Calls a kernel for a prompt's tokens; which: its arguments that say what they read."""
    query, key_pages, value_pages, pages = paged
    query, pages = query.contiguous(), pages.to(torch.int64).contiguous()
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    num_tokens, num_heads, dim = query.shape
    _, num_kv_heads, page_size, _ = value_pages.shape
    value_dim = row_dim(value_pages)
    out = query.new_empty(num_tokens, num_heads, value_dim)
    kernel(
        (cpu.DTYPES[query.dtype], cpu.PAGE_DTYPES[key_pages.dtype]),
        (num_tokens, num_heads, num_kv_heads, dim, value_dim, page_size),
        query.data_ptr(),
        key_pages.data_ptr(),
        key_pages.stride()[:3],
        value_pages.data_ptr(),
        value_pages.stride()[:3],
        (pages.data_ptr(), len(pages)),
        start,
        *which,
        scale,
        softcap or 0.0,
        cpu.address(sinks),
        out.data_ptr(),
    )
    return out

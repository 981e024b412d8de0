"""Attention on a CPU by our C++ extension, for decode steps and prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keyhole.kernels import cpu
from keyhole.kernels.reference.rope import angles_below

# Sizes (rank, chunks taken, tokens of a chunk), addresses, angles: as in `attend_low_rank`.
_NO_LOW_RANK = ((0, 0, 1), (0, 0, 0, 0), (0, 0, 0))


def attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    indices: Tensor | None,
    counts: Tensor | None,
    unit: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As the reference, its selection in parts."""
    out = query.new_empty(*query.shape[:2], value_pages.shape[-1])
    _attend(
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        indices=indices,
        counts=counts,
        unit=unit,
        window=window,
        out=out,
    )
    return out


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
    """As the reference, but keys stay float32 throughout and are never all materialized."""
    assert coefficients.is_contiguous()  # the cache allocates them contiguous
    # Kept in variables: a copy referenced by its address only would be freed at once.
    basis, first, taken = basis.contiguous(), cpu.as_int32(first), cpu.as_int32(taken)
    pairs, angles = 0, None
    if frequencies is not None:
        pairs = len(frequencies)
        angles = angles_below(page_table.shape[1] * key_pages.shape[2], frequencies)
    low_rank = (
        (coefficients.shape[2], taken.shape[2], chunk),
        tuple(x.data_ptr() for x in (coefficients, basis, first, taken)),
        (cpu.address(angles), pairs, key_pages.shape[3] - 2 * pairs if last else 0),
    )
    out = query.new_empty(*query.shape[:2], value_pages.shape[-1])
    _attend(
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        indices=indices,
        counts=counts,
        low_rank=low_rank,
        out=out,
    )
    return out


def attend_and_score(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    reduces: list[str],
    units: list[int],
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """As the reference, its requests in parts."""
    tokens = page_table.shape[1] * key_pages.shape[2]
    out = query.new_empty(*query.shape[:2], value_pages.shape[-1])
    scores, requests, weights = [], [], None
    for reduce, unit in zip(reduces, units, strict=True):
        if reduce == "group_max":  # the result of `head_scores`, from the same pass
            if weights is None:
                weights = torch.empty(len(query), key_pages.shape[1], tokens, dtype=torch.float32)
            scores.append(weights)
        else:
            scores.append(torch.empty(len(query), 1, tokens // unit, dtype=torch.float32))
            requests.append((reduce == "sum", unit, scores[-1].data_ptr()))
    _attend(
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        requests=requests,
        weights=weights,
        out=out,
    )
    pooled = [
        score.unflatten(2, (-1, unit)).sum(3) if reduce == "group_max" and unit > 1 else score
        for score, reduce, unit in zip(scores, reduces, units, strict=True)
    ]
    return out, pooled


def head_scores(
    query: Tensor, key_pages: Tensor, page_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """As the reference."""
    tokens = page_table.shape[1] * key_pages.shape[2]
    out = torch.empty(len(query), key_pages.shape[1], tokens, dtype=torch.float32)
    _attend(query, key_pages, key_pages, page_table, lengths, scale=scale, weights=out)
    return out


def _attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    counts: Tensor | None = None,
    unit: int = 1,
    window: int | None = None,
    requests: Sequence[tuple[bool, int, int]] = (),
    low_rank: tuple[tuple[int, ...], ...] = _NO_LOW_RANK,
    weights: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    query, page_table, lengths = query.contiguous(), cpu.as_rows(page_table), cpu.as_int32(lengths)
    indices = None if indices is None else cpu.as_int32(indices)
    counts = None if counts is None else cpu.as_int32(counts)
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    selection = (1, 0, 1) if indices is None else (*indices.shape[1:], unit)
    num_rows, num_heads, dim = query.shape
    _, num_kv_heads, page_size, value_dim = value_pages.shape
    cpu.extension.attend(
        cpu.DTYPES[query.dtype],
        (num_rows, num_heads, num_kv_heads, dim, value_dim, page_size),
        query.data_ptr(),
        key_pages.data_ptr(),
        key_pages.stride()[:3],
        value_pages.data_ptr(),
        value_pages.stride()[:3],
        page_table.data_ptr(),
        page_table.stride(0),
        page_table.shape[1],
        lengths.data_ptr(),
        cpu.address(indices),
        cpu.address(counts),
        selection,
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
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As the reference."""
    size = key_pages.shape[2]
    pages = pages[: -(-(start + len(query)) // size)]
    paged = (query, key_pages, value_pages, pages)
    return _prefill(*paged, start, (0, 0, 0), scale, window, softcap, sinks)


def sparse_prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    positions: Tensor,
    chosen: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As the reference."""
    positions, chosen = positions.to(torch.int64).contiguous(), chosen.int().contiguous()
    places = (positions.data_ptr(), chosen.data_ptr(), len(chosen))
    paged = (query, key_pages, value_pages, pages)
    return _prefill(*paged, 0, places, scale, window, softcap, sinks)


def _prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    start: int,
    places: tuple[int, int, int],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    query, pages = query.contiguous(), pages.to(torch.int64).contiguous()
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    num_tokens, num_heads, dim = query.shape
    _, num_kv_heads, page_size, value_dim = value_pages.shape
    out = query.new_empty(num_tokens, num_heads, value_dim)
    cpu.extension.prefill(
        cpu.DTYPES[query.dtype],
        (num_tokens, num_heads, num_kv_heads, dim, value_dim, page_size),
        query.data_ptr(),
        key_pages.data_ptr(),
        key_pages.stride()[:3],
        value_pages.data_ptr(),
        value_pages.stride()[:3],
        (pages.data_ptr(), len(pages)),
        start,
        window or 0,
        places,
        scale,
        softcap or 0.0,
        cpu.address(sinks),
        out.data_ptr(),
    )
    return out

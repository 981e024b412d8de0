"""Paged caches of cruel shapes: permuted pages, ragged lengths, NaN where nothing was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.oracle import Array, float64, in_order

GROUPS = (1, 3, 4, 7, 8)
HEAD_SIZES = (16, 64, 80, 128)
PAGE_SIZES = (1, 4, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Relative error of one rounding to the dtype of the result, doubled.
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@dataclass(frozen=True)
class Paged:
    """A batch: query [B, Hq, D] and the pages of B sequences; all else is NaN."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    scale: float
    softcap: float | None
    sinks: Tensor | None
    window: int | None

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    def tokens(self, row: int) -> tuple[Array, Array]:
        """Keys and values of one sequence, float64 [Hkv, N, D]."""
        table, length = self.table[row].tolist(), int(self.lengths[row])
        return in_order(self.keys, table, length), in_order(self.values, table, length)

    def sinks64(self) -> Array | None:
        return None if self.sinks is None else float64(self.sinks)


def lengths_around(page_size: int) -> st.SearchStrategy[int]:
    """One token, and the places around page ends where mistakes live."""
    edges = [1, max(1, page_size - 1), page_size, page_size + 1, 2 * page_size, 3 * page_size + 2]
    return st.sampled_from(edges)


def _windows(page_size: int) -> st.SearchStrategy[int | None]:
    """None, and windows that start at the end and at the beginning of a page."""
    around = {max(1, page_size + i) for i in (-1, 0, 1, 2)}
    return st.sampled_from([None, *sorted({1, 2} | around), 1000])


@st.composite
def paged(
    draw: st.DrawFn,
    *,
    windows: bool = True,
    max_batch: int = 3,
    lengths_of: Callable[[int], st.SearchStrategy[int]] = lengths_around,
) -> Paged:
    size = draw(st.sampled_from(PAGE_SIZES))
    dim = draw(st.sampled_from(HEAD_SIZES))
    group = draw(st.sampled_from(GROUPS))
    heads = draw(st.sampled_from((1, 2)))
    dtype = draw(st.sampled_from(DTYPES))
    lengths = draw(st.lists(lengths_of(size), min_size=1, max_size=max_batch))
    kind = draw(st.sampled_from(("same", "smaller", "shared")))
    value_dim = {"same": dim, "smaller": 12, "shared": dim - 8}[kind]
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    counts = [-(-length // size) for length in lengths]
    spare = draw(st.integers(0, 2))
    physical = torch.randperm(sum(counts) + spare, generator=random)
    table = torch.zeros(len(lengths), max(counts) + draw(st.integers(0, 1)), dtype=torch.int32)
    keys = torch.full((len(physical), heads, size, dim), torch.nan)
    values = torch.full((len(physical), heads, size, value_dim), torch.nan)
    used = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = physical[used : used + count]
        used += count
        table[row, :count] = pages
        for i in range(length):
            keys[pages[i // size], :, i % size] = torch.randn(heads, dim, generator=random)
            values[pages[i // size], :, i % size] = torch.randn(heads, value_dim, generator=random)
    keys, values = keys.to(dtype), values.to(dtype)
    if kind == "shared":
        values = keys[..., :value_dim]
    elif draw(st.booleans()):  # as the cache stores them: a head's values behind its keys
        stored = torch.cat([keys.flatten(2), values.flatten(2)], -1)
        keys = stored[..., : size * dim].unflatten(-1, (size, dim))
        values = stored[..., size * dim :].unflatten(-1, (size, value_dim))
    query = torch.randn(len(lengths), heads * group, dim, generator=random).to(dtype)
    with_sinks = draw(st.booleans())
    return Paged(
        query=query,
        keys=keys,
        values=values,
        table=table,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        scale=draw(st.sampled_from((dim**-0.5, 0.5))),
        softcap=draw(st.sampled_from((None, 5.0))),
        sinks=torch.randn(heads * group, generator=random).to(dtype) if with_sinks else None,
        window=draw(_windows(size)) if windows else None,
    )


def assert_close(found: Tensor, wanted: Array, dtype: torch.dtype, *, loss: float = 0.0) -> None:
    """Within one rounding to dtype, and `loss` absolute where the operation computes in it."""
    assert not found.isnan().any()
    difference = np.abs(float64(found) - wanted)
    allowed = _ROUNDING[dtype] * np.abs(wanted) + 1e-5 + loss
    assert (difference <= allowed).all(), f"off by {(difference - allowed).max()} too much"

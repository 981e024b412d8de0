"""Attention with low-rank keys: rebuilt, rotated and attended to by the formula in float64."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.kernels import LowRank, Selection
from tests.effort import examples
from tests.kernels.paged import Paged, assert_close, paged
from tests.oracle import Array, attention, float64

_LOSS = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


def turned(key: Array, position: int, frequencies: Array, *, last: bool) -> Array:
    """A key rotated by this many positions: each pair of its first or last numbers is complex."""
    pairs, out = len(frequencies), key.copy()
    part = slice(len(key) - 2 * pairs, None) if last else slice(0, 2 * pairs)
    numbers = key[part][:pairs] + 1j * key[part][pairs:]
    numbers = numbers * np.exp(1j * position * frequencies)
    out[part] = np.concatenate([numbers.real, numbers.imag])
    return out


@st.composite
def low_ranks(draw: st.DrawFn) -> tuple[Paged, LowRank, Selection]:
    case = draw(paged(windows=False))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    (num_pages, heads, size, dim), lengths = case.keys.shape, case.lengths.tolist()
    rank = draw(st.sampled_from((1, 5, 16, 33)))
    chunk = draw(st.sampled_from([n for n in (1, 2, 4, 8) if size % n == 0]))
    counts = torch.tensor(
        [[draw(st.integers(1, length)) for _ in range(heads)] for length in lengths]
    )
    tokens = torch.full((len(lengths), heads, int(counts.max())), -1, dtype=torch.int32)
    taken = torch.full((len(lengths), heads, draw(st.integers(0, 2))), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for head in range(heads):
            chosen = torch.randperm(length, generator=random)[: counts[row, head]]
            tokens[row, head, : len(chosen)] = chosen.sort().values
            chunks = torch.randperm(-(-length // chunk), generator=random)[: taken.shape[2]]
            taken[row, head, : len(chunks)] = chunks
    pairs = draw(st.sampled_from((None, 3, dim // 2)))
    frequencies = None if pairs is None else torch.rand(pairs, generator=random).double()
    coefficients = torch.randn(num_pages, size, rank, generator=random) / math.sqrt(rank)
    low_rank = LowRank(
        coefficients=coefficients.to(case.keys.dtype),
        basis=torch.randn(len(lengths), rank, heads, dim, generator=random).to(case.keys.dtype),
        first=torch.tensor([draw(st.integers(0, length)) for length in lengths]).int(),
        taken=taken,
        chunk=chunk,
        frequencies=frequencies,
        last=draw(st.booleans()),
    )
    return case, low_rank, Selection(tokens, counts.int(), 1)


@given(low_ranks())
@examples(80)
def test_attention_reads_rebuilt_keys(drawn: tuple[Paged, LowRank, Selection]) -> None:
    case, low_rank, selection = drawn
    found = kernels.attend_low_rank(
        (case.query, case.keys, case.values, case.table, case.lengths),
        selection=selection,
        low_rank=low_rank,
        scale=case.scale,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    basis, coefficients = float64(low_rank.basis), float64(low_rank.coefficients)
    turn = low_rank.frequencies
    for row in range(len(case.lengths)):
        keys, values = case.tokens(row)
        read = []
        for head, listed in enumerate(selection.indices[row].tolist()):
            tokens = listed[: int(selection.counts[row, head])]
            read.append(tokens)
            taken = low_rank.taken[row, head].tolist()
            for token in tokens:
                if token >= low_rank.first[row] or token // low_rank.chunk in taken:
                    continue
                page, place = case.table[row, token // case.page_size], token % case.page_size
                key = coefficients[page, place] @ basis[row, :, head]
                if turn is not None:
                    key = turned(key, token, float64(turn), last=low_rank.last)
                keys[head, token] = key
        wanted, _ = attention(
            float64(case.query[row]),
            keys,
            values,
            read,
            scale=case.scale,
            softcap=case.softcap,
            sinks=case.sinks64(),
        )
        assert_close(found[row], wanted, case.query.dtype, loss=_LOSS[case.query.dtype])


def test_long_lists_are_read_in_parts() -> None:
    """More tokens than a thread takes at once; with a whole basis nothing is lost."""
    random = torch.Generator().manual_seed(0)
    length, heads, dim, size = 3000, 2, 24, 8
    pages = torch.randperm(length // size, generator=random).int()
    before = torch.randn(length, heads, dim, generator=random)
    frequencies = 1e4 ** (-torch.arange(dim // 2).double() / 12)
    keys, coefficients = (
        torch.empty(len(pages), heads, size, dim),
        torch.empty(len(pages), size, 48),
    )
    table = pages.long()
    places = torch.arange(length)
    keys[table] = (
        kernels.shift_rope(before, places[:, None], frequencies, last=False)
        .view(len(pages), size, heads, dim)
        .transpose(1, 2)
    )
    coefficients[table] = before.flatten(1).view(len(pages), size, 48)
    values = torch.randn(len(pages), heads, size, dim, generator=random)
    query = torch.randn(1, 6, dim, generator=random)
    tokens = torch.arange(0, length, 2).int().expand(1, heads, -1)
    selection = Selection(tokens, torch.full((1, heads), length // 2).int(), 1)
    low_rank = LowRank(
        coefficients=coefficients,
        basis=torch.eye(48).view(1, 48, heads, dim),
        first=torch.tensor([length]).int(),
        taken=torch.empty(1, heads, 0).int(),
        chunk=8,
        frequencies=frequencies,
        last=False,
    )
    lengths = torch.tensor([length]).int()
    rest = (values, pages[None], lengths)
    broken = torch.full_like(keys, torch.nan)  # of which none is read
    found = kernels.attend_low_rank(
        (query, broken, *rest), selection=selection, low_rank=low_rank, scale=0.3
    )
    wanted = kernels.attend((query, keys, *rest), selection=selection, scale=0.3)
    assert (found - wanted).abs().max() < 1e-5
    # A choice that all heads share is as good as one for each.
    shared = Selection(tokens[:, :1], selection.counts[:, :1], 1)
    again = kernels.attend_low_rank(
        (query, broken, *rest), selection=shared, low_rank=low_rank, scale=0.3
    )
    assert torch.equal(again, found)

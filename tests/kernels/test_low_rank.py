"""Attention with low-rank keys: rebuilt, rotated and attended to by the formula in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keyhole import kernels
from keyhole.kernels import LowRank, PagedQuery, Selection
from keyhole.kernels.composed.low_rank import Rotation
from tests.effort import examples
from tests.kernels.paged import Paged, assert_close, paged
from tests.kernels.test_quantised import KV_DTYPES, largest_change, largest_errors, stored
from tests.oracle import Array, attention, float64, in_order

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


@dataclass(frozen=True)
class In8Bits:
    """Keys and values of one sequence [Hkv, N, D], float64, and its pages, which have 8 bits.

    errors: the largest of each number. Keys before RoPE are near a few directions.
    """

    keys: Array
    values: Array
    errors: tuple[Array, Array]
    key_pages: Tensor
    value_pages: Tensor
    table: Tensor
    frequencies: Tensor
    last: bool

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def turned_keys(self, keys: Array, sign: int) -> Array:
        """Keys turned by their positions, or back."""
        turns = float64(self.frequencies)
        return np.stack(
            [
                [turned(key, sign * i, turns, last=self.last) for i, key in enumerate(head)]
                for head in keys
            ]
        )


_HEADS, _DIM, _VALUE_DIM, _SIZE, _CHUNK = 2, 16, 12, 8, 4


@st.composite
def in_8_bits(draw: st.DrawFn) -> In8Bits:
    kv_dtype, length = draw(st.sampled_from(KV_DTYPES)), draw(st.sampled_from((1, 8, 37, 64)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    pages = -(-length // _SIZE)
    mixed = torch.randn(_HEADS * _DIM, _HEADS * _DIM, generator=random)
    spread = 0.8 ** torch.arange(_HEADS * _DIM)
    before = torch.randn(length, _HEADS * _DIM, generator=random) * spread @ mixed / 4
    frequencies = torch.rand(draw(st.sampled_from((3, _DIM // 2))), generator=random).double()
    last, places = draw(st.booleans()), torch.arange(length)
    keys = kernels.shift_rope(
        before.unflatten(1, (_HEADS, -1)), places[:, None], frequencies, last=last
    )
    values = torch.randn(length, _HEADS, _VALUE_DIM, generator=random)
    table = torch.randperm(pages + 1, generator=random)[:pages]
    rows = []
    for x in (keys, values):
        floats = torch.full((pages + 1, _HEADS, _SIZE, x.shape[2]), torch.nan)
        floats[table[places // _SIZE], :, places % _SIZE] = x
        rows.append(stored(floats, kv_dtype))
    numbers = [float64(x.transpose(0, 1)) for x in (keys, values)]
    errors = [largest_errors(kv_dtype, x) for x in numbers]
    return In8Bits(*numbers, (errors[0], errors[1]), *rows, table[None].int(), frequencies, last)


@given(case=in_8_bits(), rank=st.sampled_from((1, 8, 32)))
@examples(50)
def test_keys_of_8_bits_are_decomposed_with_their_errors_and_no_others(
    case: In8Bits, rank: int
) -> None:
    """Compared with the best approximation of the keys that were given, in float64."""
    coefficients = torch.full((len(case.key_pages), _SIZE, rank), torch.nan)
    table, rotation = case.table[0].long(), Rotation(case.frequencies, case.last)
    basis = kernels.decompose(case.key_pages, coefficients, table, case.length, rotation)
    rows = coefficients[table].flatten(0, 1)[: case.length]
    found = np.einsum("nr,rhd->hnd", float64(rows), float64(basis))
    before = case.turned_keys(case.keys, -1)
    flat = before.transpose(1, 0, 2).reshape(case.length, -1)
    lost = np.linalg.norm(np.linalg.svd(flat, compute_uv=False)[rank:])
    # What is decomposed has these errors, and its best approximation is no worse than the keys'.
    bound = 2 * np.linalg.norm(case.errors[0]) + lost
    assert np.linalg.norm(found - before) <= bound + 1e-4
    if rank == _HEADS * _DIM:
        again = np.abs(case.turned_keys(found, 1) - case.keys)
        assert (again <= case.errors[0] + 1e-5 * (1 + np.abs(case.keys))).all()


def test_a_chunk_of_one_token_is_its_mean_exactly() -> None:
    """Else rounding would decide which of such chunks are outliers."""
    keys = torch.randn(40, 2, 3, 8)
    keys[0] = 0.0
    marks, cosines = torch.empty(40, 3, 2, 8), torch.full((40, 3, 2), torch.nan)
    pages = torch.arange(40)
    kernels.chunk_landmarks(keys, marks, cosines, pages, torch.full((40,), 3))
    assert (cosines == 1.0).all()
    assert torch.equal(marks, keys.transpose(1, 2))


@given(case=in_8_bits(), seed=st.integers(0, 2**31))
@examples(50)
def test_chunks_of_keys_of_8_bits_are_scored_by_the_means_of_the_keys(
    case: In8Bits, seed: int
) -> None:
    """Compared with the keys that were given, in float64: means, outliers and a query's weights."""
    pages, count = case.table[0].long(), -(-case.length // _CHUNK)
    marks = torch.full((len(case.key_pages), _SIZE // _CHUNK, _HEADS, _DIM), torch.nan)
    cosines = torch.full(marks.shape[:3], torch.nan)
    filled = torch.full_like(pages, _SIZE)
    filled[-1] = case.length - (len(pages) - 1) * _SIZE
    kernels.chunk_landmarks(case.key_pages, marks, cosines, pages, filled)
    found, near = (float64(x[pages].flatten(0, 1)[:count]) for x in (marks, cosines))
    means, errors = (
        np.stack([x[:, i : i + _CHUNK].mean(1) for i in range(0, case.length, _CHUNK)], 1)
        for x in (case.keys, case.errors[0])
    )
    assert (np.abs(found.transpose(1, 0, 2) - means) <= errors + 1e-5).all()
    for head in range(_HEADS):
        for chunk in range(count):
            own = slice(chunk * _CHUNK, (chunk + 1) * _CHUNK)
            keys, mean = case.keys[head, own], means[head, chunk]
            sizes, size = np.linalg.norm(keys, axis=1), np.linalg.norm(mean)
            wanted = (keys @ mean / sizes / size).min()
            # Two directions differ by twice the relative error at most.
            loss = np.linalg.norm(case.errors[0][head, own], axis=1) / sizes
            bound = 2 * loss.max() + 2 * np.linalg.norm(errors[head, chunk]) / size
            assert abs(near[chunk, head] - wanted) <= bound + 1e-5
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 3 * _HEADS, _DIM, generator=random)
    none, chunks = torch.empty(1, _HEADS, 0).int(), torch.tensor([count]).int()
    scores = kernels.chunk_scores(query, marks, case.table, none, chunks, 0)[0, :, :count]
    for kv in range(_HEADS):
        heads = float64(query[0, 3 * kv : 3 * kv + 3]) / math.sqrt(_DIM)
        powers = np.exp(heads @ means[kv].T)
        weights = (powers / powers.sum(1, keepdims=True)).max(0)
        factor = np.exp(2 * (np.abs(heads) @ errors[kv].T).max())
        assert (float64(scores[kv]) <= weights * factor * (1 + 1e-4)).all()
        assert (float64(scores[kv]) >= weights / factor * (1 - 1e-4)).all()


@pytest.mark.parametrize("own", [True, False])
@given(case=in_8_bits(), seed=st.integers(0, 2**31))
@examples(50)
def test_attention_over_low_rank_keys_has_the_errors_of_rows_of_8_bits(
    own: bool, case: In8Bits, seed: int
) -> None:
    """Compared with the keys and values that were given, in float64.

    own: every key is read from its row; otherwise those of a chunk and of the newest tokens, and
    the others are rebuilt.
    """
    random, rank = torch.Generator().manual_seed(seed), 8
    low_rank = LowRank(
        coefficients=torch.randn(len(case.key_pages), _SIZE, rank, generator=random) / 3,
        basis=torch.randn(1, rank, _HEADS, _DIM, generator=random),
        first=torch.tensor([0 if own else case.length - case.length // 4]).int(),
        taken=torch.zeros(1, _HEADS, 1).int(),
        chunk=_CHUNK,
        frequencies=case.frequencies,
        last=case.last,
    )
    count = -(-case.length * 2 // 3)
    lists = [torch.randperm(case.length, generator=random)[:count].sort() for _ in range(_HEADS)]
    tokens = torch.stack([one.values for one in lists])
    selection = Selection(tokens[None].int(), torch.full((1, _HEADS), count).int(), 1)
    query, scale = torch.randn(1, 3 * _HEADS, _DIM, generator=random) / 2, _DIM**-0.5
    lengths = torch.tensor([case.length]).int()
    paged = PagedQuery(query, case.key_pages, case.value_pages, case.table, lengths)
    found = kernels.attend_low_rank(paged, selection=selection, low_rank=low_rank, scale=scale)
    errors = case.errors[0].copy()
    table, length = case.table[0].tolist(), case.length
    rows = (kernels.dequantised(x) for x in (case.key_pages, case.value_pages))
    held, held_values = (in_order(x, table, length) for x in rows)
    keys = case.keys.copy()
    for token in range(_CHUNK, int(low_rank.first)):
        numbers = float64(low_rank.coefficients[table[token // _SIZE], token % _SIZE])
        for head in range(_HEADS):
            key = numbers @ float64(low_rank.basis[0, :, head])
            key = turned(key, token, float64(case.frequencies), last=case.last)
            keys[head, token] = held[head, token] = key
            errors[head, token] = 0
    one, read = float64(query[0]), tokens.tolist()
    wanted, _ = attention(one, keys, case.values, read, scale=scale)
    bound = largest_change(one, case.values, (errors, case.errors[1]), read, scale)
    assert (np.abs(float64(found[0]) - wanted) <= bound + 1e-4).all()
    exact, _ = attention(one, held, held_values, read, scale=scale)
    assert_close(found[0], exact, torch.float32, loss=1e-5)

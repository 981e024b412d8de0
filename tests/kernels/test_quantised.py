"""Keys and values in 8 bits: error bounds in float64, and every reader against dequantised rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keyhole import kernels
from keyhole.kernels import ScoreRequest, Selection, cpu
from keyhole.kernels.reference.quantised import STORED
from tests.effort import examples
from tests.kernels.paged import DTYPES, Paged, assert_close, paged
from tests.oracle import attention, bounds, float64, per_page, token_scores, tokens_of, visible

many = examples(60)
KV_DTYPES = tuple(STORED)


def stored(pages: Tensor, kv_dtype: str) -> Tensor:
    """Pages of floats in 8 bits, written as the engine writes them; unwritten places hold NaN."""
    count, heads, size, dim = pages.shape
    rows = pages.new_empty(count, heads, size, dim + 4, dtype=STORED[kv_dtype])
    kernels.append(
        rows, None, pages.transpose(1, 2).flatten(0, 1), None, torch.arange(count * size)
    )
    return rows


@st.composite
def in_8_bits(draw: st.DrawFn, *, windows: bool = True) -> tuple[Paged, Paged]:
    """A case whose pages have 8 bits, and the same with what they hold, in float32."""
    case, kv_dtype = draw(paged(windows=windows)), draw(st.sampled_from(KV_DTYPES))
    rows = [stored(pages, kv_dtype) for pages in (case.keys, case.values.contiguous())]
    if draw(st.booleans()):  # as the cache stores them: a head's values behind its keys
        size, ends = case.page_size, [x.shape[-1] for x in rows]
        joined = torch.cat([x.flatten(2) for x in rows], -1).split([size * n for n in ends], -1)
        rows = [x.unflatten(-1, (size, n)) for x, n in zip(joined, ends, strict=True)]
    held = [kernels.dequantised(x) for x in rows]
    return (
        dataclasses.replace(case, keys=rows[0], values=rows[1]),
        dataclasses.replace(case, keys=held[0], values=held[1]),
    )


def bound_of(kv_dtype: str, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The largest error of numbers x [..., D] whose scales are [..., 1]."""
    if kv_dtype == "int8":
        return np.broadcast_to(scale / 2, x.shape)
    return np.maximum(np.abs(x) / 16, scale / 1024)  # half a unit of 3 bits; of the subnormals


def largest_errors(kv_dtype: str, x: np.ndarray) -> np.ndarray:
    """The largest error of each number of rows [..., D], with the rounding of their scales."""
    scale = np.abs(x).max(-1, keepdims=True) / {"int8": 127.0, "fp8": 448.0}[kv_dtype]
    return bound_of(kv_dtype, x, scale) * (1 + 1e-5)


def largest_change(
    query: np.ndarray,
    values: np.ndarray,
    errors: tuple[np.ndarray, np.ndarray],
    read: list[list[int]],
    scale: float,
) -> np.ndarray:
    """How much errors of keys and values may change `attention`, [Hq, Dv].

    A logit changes by at most d, so a weight by a factor of at most exp(2 d).
    """
    group, out = len(query) // len(values), []
    for head, numbers in enumerate(np.abs(query)):
        own = head // group
        of_keys, of_values = (x[own, read[own]] for x in errors)
        most = np.expm1(2 * scale * (of_keys @ numbers).max())
        out.append(most * np.abs(values[own, read[own]]).max(0) + of_values.max(0))
    return np.stack(out)


@given(
    kv_dtype=st.sampled_from(KV_DTYPES),
    dtype=st.sampled_from(DTYPES),
    dim=st.sampled_from((4, 12, 64, 80)),
    power=st.integers(-8, 4),
    seed=st.integers(0, 2**31),
)
@many
def test_the_error_of_a_number_is_bounded_by_its_row(
    kv_dtype: str, dtype: torch.dtype, dim: int, power: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    x = (torch.randn(1, 2, 8, dim, generator=random) * 10.0**power).to(dtype)
    x[0, 0, 0] = 0.0
    x[0, 1, :, 0] *= 3  # one number much above the others of its row
    x = x.clamp(-6e4, 6e4)
    found = float64(kernels.dequantised(stored(x, kv_dtype)))
    exact = float64(x)
    assert (np.abs(found - exact) <= largest_errors(kv_dtype, exact)).all()
    assert not found[0, 0, 0].any()


@given(kv_dtype=st.sampled_from(KV_DTYPES), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
@many
def test_rows_are_the_same_on_every_path(kv_dtype: str, dtype: torch.dtype, seed: int) -> None:
    """Documents that one machine stored are read by another: rows are bitwise the definition's."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, 4, 20, generator=random).to(dtype)
    x[0, 0] = torch.arange(-10, 10).to(dtype)  # ties
    x[1, 0, 0] = 0.0
    x[1, 1, 1] *= 1e-6
    wanted = kernels.quantise(x, STORED[kv_dtype])
    assert torch.equal(stored(x, kv_dtype), wanted)
    again = stored(kernels.dequantised(wanted), kv_dtype)  # numbers survive; scales may round
    assert torch.equal(again[..., :-4], wanted[..., :-4])


@pytest.mark.parametrize("dim", [5, 6, 7])
def test_a_single_row_may_begin_anywhere(dim: int) -> None:
    row = torch.randn(1, dim, generator=torch.Generator().manual_seed(dim))
    for dtype in STORED.values():
        rows = kernels.quantise(row, dtype)
        both = kernels.dequantised(rows.repeat(2, 1))  # several rows are copied anyway
        assert torch.equal(kernels.dequantised(rows), both[:1])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_pattern_of_8_bits_is_read_as_its_number(kv_dtype: str) -> None:
    """A row per pattern, and a query that reads its first number, by attention with one token."""
    patterns = torch.arange(256, dtype=torch.uint8)
    if kv_dtype == "fp8":
        patterns = patterns[(patterns & 0x7F) != 0x7F]  # NaN, which is never written
        numbers = patterns.view(torch.float8_e4m3fn).float()
    else:
        numbers = patterns.view(torch.int8).float()
    count = len(patterns)
    rows = torch.zeros(count, 1, 1, 20, dtype=torch.uint8)
    rows[..., :16] = patterns[:, None, None, None]
    rows[..., 16:] = torch.tensor([0.5]).view(torch.uint8)
    rows = rows.view(STORED[kv_dtype])
    table = torch.arange(count, dtype=torch.int32)[:, None]
    lengths = torch.ones(count, dtype=torch.int32)
    paged = kernels.PagedQuery(torch.ones(count, 1, 16), rows, rows, table, lengths)
    out = kernels.attend(paged, scale=1.0)
    torch.testing.assert_close(out[:, 0], (numbers / 2)[:, None].expand(-1, 16), rtol=0, atol=0)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_a_number_that_is_not_finite_is_nan(kv_dtype: str, bad: float) -> None:
    x = torch.ones(1, 1, 3, 8)
    x[0, 0, 1, 3] = bad
    found = kernels.dequantised(stored(x, kv_dtype))
    assert found[0, 0, 1].isnan().all()
    assert not found[0, 0, 0].isnan().any()
    assert not found[0, 0, 2].isnan().any()


@given(kv_dtype=st.sampled_from(KV_DTYPES), data=st.data())
@many
def test_rows_land_in_their_slots_and_nothing_else_changes(
    kv_dtype: str, data: st.DataObject
) -> None:
    size, heads, dim = 4, 2, 8
    slots = data.draw(st.lists(st.integers(0, 5 * size - 1), unique=True, min_size=1, max_size=9))
    new = torch.randn(len(slots), heads, dim)
    rows = kernels.quantise(new, STORED[kv_dtype])
    before = torch.randint(0, 100, (5, heads, size, dim + 4)).to(STORED[kv_dtype])
    wanted = before.clone()
    for row, slot in zip(rows, slots, strict=True):
        wanted[slot // size, :, slot % size] = row
    for given_rows in (new, rows):  # quantised here, and copied
        pages = before.clone()
        kernels.append(pages, None, given_rows, None, torch.tensor(slots))
        assert torch.equal(pages, wanted)


def _seen(held: Paged, window: int | None = None) -> list[list[int]]:
    return [visible(length, window) for length in held.lengths.tolist()]


def _oracle(held: Paged, read: list[list[int]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Results and weights of each row, all of whose heads read the positions `read[row]`."""
    outs, weights = [], []
    for row, positions in enumerate(read):
        out, shares = attention(
            float64(held.query[row]),
            *held.tokens(row),
            [positions] * held.num_kv_heads,
            scale=held.scale,
            softcap=held.softcap,
            sinks=held.sinks64(),
        )
        outs.append(out)
        weights.append(shares)
    return np.stack(outs), weights


def _options(case: Paged) -> dict[str, Any]:
    return {"scale": case.scale, "softcap": case.softcap, "sinks": case.sinks}


def _arguments(case: Paged) -> kernels.PagedQuery:
    return kernels.PagedQuery(case.query, case.keys, case.values, case.table, case.lengths)


def digit_losses(case: Paged, held: Paged) -> tuple[float, float]:
    """The share of a weight, and the size of a result, that whole numbers of 16 bits may lose.

    A processor may multiply queries of 16 bits and int8 so: a number of a query is rounded to 2^-16
    of the largest one, a weight to 2^-17.
    """
    if case.keys.dtype != torch.int8 or case.query.dtype == torch.float32:
        return 0.0, 0.0
    keys = float64(held.keys.nan_to_num().abs().sum(-1).max())
    logit = 2.0**-16 * case.scale * float64(case.query.abs().max()) * keys
    rounded = int(case.lengths.max()) * 2.0**-17
    return float(2 * logit), float(
        (2 * logit + rounded) * float64(held.values.nan_to_num().abs().max())
    )


@given(in_8_bits())
@many
def test_attention_is_that_over_the_dequantised_rows(cases: tuple[Paged, Paged]) -> None:
    case, held = cases
    found = kernels.attend(_arguments(case), window=case.window, **_options(case))
    assert found.dtype == case.query.dtype
    wanted, _ = _oracle(held, _seen(held, case.window))
    assert_close(found, wanted, case.query.dtype, loss=digit_losses(case, held)[1])


@given(in_8_bits(windows=False), st.data())
@many
def test_a_selection_of_tokens_or_pages_is_read(
    cases: tuple[Paged, Paged], data: st.DataObject
) -> None:
    case, held = cases
    unit = data.draw(st.sampled_from((1, case.page_size)))
    lists = []
    for length in case.lengths.tolist():
        last = -(-length // unit) - 1
        lists.append(sorted({*data.draw(st.sets(st.integers(0, last), max_size=6)), last}))
    width = max(map(len, lists))
    padded = [one + [-1] * (width - len(one)) for one in lists]
    selection = Selection(
        torch.tensor(padded, dtype=torch.int32)[:, None],
        torch.tensor([[len(one)] for one in lists], dtype=torch.int32),
        unit,
    )
    found = kernels.attend(_arguments(case), selection=selection, **_options(case))
    read = [tokens_of(one, unit, int(n)) for one, n in zip(lists, case.lengths, strict=True)]
    wanted, _ = _oracle(held, read)
    assert_close(found, wanted, case.query.dtype, loss=digit_losses(case, held)[1])


@given(in_8_bits(windows=False))
@many
def test_scores_are_those_of_the_dequantised_keys(cases: tuple[Paged, Paged]) -> None:
    case, held = cases
    requests = (
        ScoreRequest("max", 1),
        ScoreRequest("sum", case.page_size),
        ScoreRequest("group_max", 1),
    )
    out, (largest, pages, groups) = kernels.attend_and_score(
        _arguments(case), requests=requests, **_options(case)
    )
    wanted, weights = _oracle(held, _seen(held))
    share, loss = digit_losses(case, held)
    assert_close(out, wanted, case.query.dtype, loss=loss)
    near = {"rtol": 1e-4 + share, "atol": 1e-5}
    for row, length in enumerate(case.lengths.tolist()):
        exact = token_scores(weights[row], "max")
        assert np.allclose(float64(largest[row, 0, :length]), exact, **near)
        summed = per_page(token_scores(weights[row], "sum"), case.page_size)
        assert np.allclose(float64(pages[row, 0, : len(summed)]), summed, **near)
        split = weights[row].reshape(case.num_kv_heads, -1, length).max(1)
        assert np.allclose(float64(groups[row, :, :length]), split, **near)


@given(in_8_bits(), st.data())
@many
def test_a_prompt_reads_the_dequantised_rows(
    cases: tuple[Paged, Paged], data: st.DataObject
) -> None:
    case, held = cases
    length = int(case.lengths[0])
    count = data.draw(st.integers(1, length))
    random = torch.Generator().manual_seed(count)
    shape = count, *case.query.shape[1:]
    query = torch.randn(shape, generator=random).to(case.query.dtype)
    pages = case.table[0, : -(-length // case.page_size)].long()
    found = kernels.prefill(
        query, case.keys, case.values, pages, length - count, window=case.window, **_options(case)
    )
    keys, values = held.tokens(0)
    for i in range(count):
        read = [visible(length - count + i + 1, case.window)] * case.num_kv_heads
        wanted, _ = attention(
            float64(query[i]),
            keys,
            values,
            read,
            scale=case.scale,
            softcap=case.softcap,
            sinks=case.sinks64(),
        )
        # The definition's products are in query's dtype.
        assert_close(
            found[i], wanted, query.dtype, loss=0 if query.dtype == torch.float32 else 0.03
        )


@given(in_8_bits(windows=False))
@many
def test_bounds_are_those_of_the_dequantised_keys(cases: tuple[Paged, Paged]) -> None:
    case, held = cases
    length, dim = int(case.lengths[0]), held.keys.shape[-1]
    pages = case.table[0, : -(-length // case.page_size)].long()
    filled = torch.full_like(pages, case.page_size)
    filled[-1] = length - (len(pages) - 1) * case.page_size
    low, high = (torch.full((len(case.keys), case.num_kv_heads, dim), torch.nan) for _ in range(2))
    kernels.page_bounds(case.keys, low, high, pages, filled)
    for found, wanted in zip((low, high), bounds(held.tokens(0)[0], case.page_size), strict=True):
        np.testing.assert_allclose(float64(found[pages].transpose(0, 1)), wanted, rtol=1e-6)


@given(in_8_bits(windows=False))
@many
def test_gathered_tokens_are_dequantised_and_gathered_rows_are_not(
    cases: tuple[Paged, Paged],
) -> None:
    case, held = cases
    length = int(case.lengths[0])
    pages, tokens = case.table[0].long(), torch.arange(length)
    found = kernels.gather_tokens(case.keys, pages, tokens)
    np.testing.assert_array_equal(float64(found.transpose(0, 1)), held.tokens(0)[0])
    rows = kernels.gather_rows(case.keys, pages, tokens)
    assert torch.equal(kernels.dequantised(rows), found)
    assert rows.dtype == case.keys.dtype


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "dim", "length"),
    [
        (4, 64, 1100),
        (1, 80, 65),
        (2, 128, 64),
        (3, 64, 63),
        (7, 20, 200),
        (8, 128, 129),
        (12, 72, 300),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_weights_are_rounded_to_16_bits_at_most(
    group: int, dim: int, length: int, dtype: torch.dtype
) -> None:
    """Over several tiles of a processor's whole numbers, and their ends."""
    random = torch.Generator().manual_seed(length)
    count = -(-length // 16)
    rows = [stored(torch.randn(count, 2, 16, dim, generator=random), "int8") for _ in range(2)]
    case = Paged(
        query=(2 * torch.randn(1, 2 * group, dim, generator=random)).to(dtype),
        keys=rows[0],
        values=rows[1],
        table=torch.randperm(count, generator=random, dtype=torch.int32)[None],
        lengths=torch.tensor([length], dtype=torch.int32),
        scale=dim**-0.5,
        softcap=None,
        sinks=None,
        window=None,
    )
    keys, values = map(kernels.dequantised, rows)
    held = dataclasses.replace(case, keys=keys, values=values)
    out, (found,) = kernels.attend_and_score(
        _arguments(case), requests=(ScoreRequest("group_max", 1),), **_options(case)
    )
    wanted, (shares,) = _oracle(held, _seen(held))
    share, loss = digit_losses(case, held)
    assert_close(out, wanted, dtype, loss=loss)
    split = shares.reshape(2, group, length).max(1)
    assert (np.abs(float64(found[0, :, :length]) - split) <= (share + 1e-4) * split).all()


@pytest.mark.skipif("amx" not in cpu.paths(), reason="needs Intel's matrix unit")
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 200), (128, 64)])
@pytest.mark.parametrize("group", [5, 8, 12, 70])
@pytest.mark.parametrize("unit", [None, 1, 16])
def test_the_matrix_unit_has_the_results_of_vectors(
    group: int, dim: int, value_dim: int, unit: int | None
) -> None:
    """So a row has the same result whatever the number of rows that share its tokens."""
    random = torch.Generator().manual_seed(group)
    keys, values = (
        stored(torch.randn(30, 2, 16, n, generator=random), "int8") for n in (dim, value_dim)
    )
    paged = kernels.PagedQuery(
        torch.randn(1, 2 * group, dim, generator=random).bfloat16(),
        keys,
        values,
        torch.randperm(30, generator=random, dtype=torch.int32)[None],
        torch.tensor([467]),
    )
    selection = None
    if unit:
        chosen = torch.arange(0, 467 // unit, 2, dtype=torch.int32)[None, None]
        selection = Selection(chosen, torch.tensor([[chosen.numel()]], dtype=torch.int32), unit)
    found = []
    before = cpu.current()
    try:
        for path in ("amx", "avx512"):
            cpu.use(path)
            found.append(kernels.attend(paged, selection=selection, scale=dim**-0.5))
    finally:
        cpu.use(before)
    assert found[0].isfinite().all()
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["query", "keys", "values"])
def test_what_is_not_finite_is_not_hidden(dtype: torch.dtype, where: str) -> None:
    pages = {name: torch.ones(7, 1, 16, 64) for name in ("keys", "values")}
    query = torch.ones(1, 2, 64, dtype=dtype)
    if where == "query":
        query[0, 1, 5] = torch.nan
    else:
        pages[where][3, 0, 2, 9] = torch.inf
    keys, values = (stored(x, "int8") for x in pages.values())
    table = torch.arange(7, dtype=torch.int32)[None]
    paged = kernels.PagedQuery(query, keys, values, table, torch.tensor([100]))
    out = kernels.attend(paged, scale=0.125)
    assert out[0, 1].isnan().all()
    if where == "query":
        torch.testing.assert_close(out[0, 0], torch.ones(64, dtype=dtype))
    else:
        assert out[0, 0].isnan().all()

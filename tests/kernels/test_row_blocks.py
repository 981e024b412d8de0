"""Rows of one sequence, as speculation verifies them: shared reads change no bit of a result."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.kernels import PagedQuery, ScoreRequest, Selection, cpu
from tests.effort import examples
from tests.kernels.paged import Paged, assert_close, paged
from tests.kernels.test_quantised import KV_DTYPES, digit_losses, stored
from tests.oracle import attention, float64, per_page, token_scores, tokens_of, visible

many = examples(100)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of sequences, each one token longer than the row before it.

    held: the same rows over float32 pages, where those of `case` have 8 bits. read: the positions
    of each row and KV head.
    """

    case: Paged
    held: Paged
    selection: Selection | None
    read: list[list[list[int]]]

    @property
    def paged(self) -> PagedQuery:
        case = self.case
        return PagedQuery(case.query, case.keys, case.values, case.table, case.lengths)

    @property
    def options(self) -> dict[str, Any]:
        case = self.case
        return {"scale": case.scale, "softcap": case.softcap, "sinks": case.sinks}


def _repeated(case: Paged, counts: list[int], seed: int) -> Paged:
    """The last `counts` tokens of each sequence as rows of the batch."""
    times = torch.tensor(counts)
    ends = case.lengths.repeat_interleave(times)
    after = torch.cat([torch.arange(n - 1, -1, -1) for n in counts]).int()
    random = torch.Generator().manual_seed(seed)
    shape = len(ends), *case.query.shape[1:]
    return dataclasses.replace(
        case,
        query=torch.randn(shape, generator=random).to(case.query.dtype),
        table=case.table.repeat_interleave(times, 0),
        lengths=ends - after,
    )


def _choice(draw: st.DrawFn, counts: list[int], lengths: list[int], unit: int) -> list[list[int]]:
    """One list per row: the first row's and newer entries; or, for some sequences, any lists."""
    lists, row = [], 0
    for count in counts:
        newest = [-(-n // unit) - 1 for n in lengths[row : row + count]]
        shares = draw(st.sampled_from((True, True, False)))
        base = draw(st.sets(st.integers(0, newest[0]), max_size=40))
        for last in newest:
            if not shares:
                base = draw(st.sets(st.integers(0, last), max_size=40))
            lists.append(sorted({*base, *range(newest[0], last + 1)}))
        row += count
    return lists


@st.composite
def row_blocks(draw: st.DrawFn, *, everything: bool = False) -> Rows:
    case = draw(paged(windows=False, lengths_of=lambda _: st.integers(1, 80)))
    counts = [draw(st.integers(1, min(n, 6))) for n in case.lengths.tolist()]
    held = case = _repeated(case, counts, draw(st.integers(0, 2**31)))
    kv_dtype = draw(st.sampled_from((None, *KV_DTYPES)))
    if kv_dtype is not None and case.values.shape[-1] > 0:
        keys, values = (stored(x.contiguous(), kv_dtype) for x in (case.keys, case.values))
        case = dataclasses.replace(case, keys=keys, values=values)
        held = dataclasses.replace(
            case, keys=kernels.dequantised(keys), values=kernels.dequantised(values)
        )
    lengths = case.lengths.tolist()
    unit = None if everything else draw(st.sampled_from((None, 1, case.page_size)))
    window = draw(st.sampled_from((None, 30, 1000)))
    if everything:
        window = None
    case, held = (dataclasses.replace(x, window=window) for x in (case, held))
    seen = [set(visible(n, window)) for n in lengths]
    if unit is None:
        read = [[sorted(one)] * case.num_kv_heads for one in seen]
        return Rows(case, held, None, read)
    heads = draw(st.sampled_from((1, case.num_kv_heads)))
    lists = [_choice(draw, counts, lengths, unit) for _ in range(heads)]
    width = max(len(row) for rows in lists for row in rows) + draw(st.integers(0, 2))
    padded = [[row + [-1] * (width - len(row)) for row in rows] for rows in lists]
    indices = torch.tensor(padded, dtype=torch.int32).transpose(0, 1).contiguous()
    sizes = torch.tensor([[len(row) for row in rows] for rows in lists], dtype=torch.int32)
    read = [
        [
            [i for i in tokens_of(rows[b], unit, lengths[b]) if i in seen[b]]
            for rows in (lists * case.num_kv_heads if heads == 1 else lists)
        ]
        for b in range(len(lengths))
    ]
    return Rows(case, held, Selection(indices, sizes.T.contiguous(), unit), read)


def _oracle(rows: Rows) -> tuple[np.ndarray, list[np.ndarray]]:
    outs, weights = [], []
    held = rows.held
    options = {"scale": held.scale, "softcap": held.softcap, "sinks": held.sinks64()}
    for row, read in enumerate(rows.read):
        out, shares = attention(float64(held.query[row]), *held.tokens(row), read, **options)
        outs.append(out)
        weights.append(shares)
    return np.stack(outs), weights


def _alone(rows: Rows, row: int) -> torch.Tensor:
    """A row in a batch of its own."""
    query, keys, values, table, lengths = rows.paged
    one, chosen = slice(row, row + 1), rows.selection
    if chosen is not None:
        chosen = Selection(chosen.indices[one], chosen.counts[one], chosen.unit)
    paged = PagedQuery(query[one], keys, values, table[one], lengths[one])
    return kernels.attend(paged, selection=chosen, window=rows.case.window, **rows.options)[0]


@pytest.mark.slow
@given(row_blocks())
@many
def test_every_row_reads_what_it_may(rows: Rows) -> None:
    out = kernels.attend(
        rows.paged, selection=rows.selection, window=rows.case.window, **rows.options
    )
    _, loss = digit_losses(rows.case, rows.held)
    assert_close(out, _oracle(rows)[0], out.dtype, loss=loss)
    if cpu.current() != cpu.REFERENCE:
        assert torch.equal(out, torch.stack([_alone(rows, i) for i in range(len(out))]))


@pytest.mark.slow
@given(row_blocks(everything=True), st.sampled_from(("max", "sum", "group_max")), st.booleans())
@many
def test_every_row_has_its_own_scores(rows: Rows, reduce: Any, pages: bool) -> None:
    case = rows.case
    request = ScoreRequest(reduce, case.page_size if pages else 1)
    out, (found,) = kernels.attend_and_score(rows.paged, requests=(request,), **rows.options)
    wanted, weights = _oracle(rows)
    share, loss = digit_losses(case, rows.held)
    assert_close(out, wanted, out.dtype, loss=loss)
    scores = np.zeros(found.shape)
    for row, shares in enumerate(weights):
        for place, heads in enumerate(np.split(shares, found.shape[1])):
            tokens = per_page(token_scores(heads, reduce.removeprefix("group_")), request.unit)
            scores[row, place, : len(tokens)] = tokens
    assert_close(found, scores, torch.float32, loss=share * scores.max())


@pytest.mark.slow
@given(row_blocks())
@many
def test_a_broken_newest_token_breaks_no_row_before_it(rows: Rows) -> None:
    """A proposed token may overflow; if it is rejected, nobody must notice."""
    case = rows.case
    last = len(case.lengths) - 1
    newest = int(case.lengths[last]) - 1
    page, place = case.table[last, newest // case.page_size], newest % case.page_size
    before = kernels.attend(
        rows.paged, selection=rows.selection, window=case.window, **rows.options
    )
    for pages in (case.keys, case.values):
        bits = pages.view(torch.uint8) if pages.element_size() == 1 else pages
        bits[page, :, place] = 0xFF if pages.element_size() == 1 else torch.nan
    after = kernels.attend(rows.paged, selection=rows.selection, window=case.window, **rows.options)
    assert torch.equal(after[:last], before[:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize(
    "length", [67, 131, *(pytest.param(n, marks=pytest.mark.slow) for n in (512, 515, 1027, 16386))]
)
def test_a_long_row_is_split_as_it_is_by_itself(
    dtype: torch.dtype, kv_dtype: str | None, length: int
) -> None:
    """Also where rows cross into another tile or split, or splits of another size (16,384 tokens).

    int8 is read in tiles of 128 tokens, whose weights are rounded together.
    """
    size, heads, dim, count = 16, 2, 16, 5
    random = torch.Generator().manual_seed(length)
    num_pages = -(-length // size)
    keys, values = torch.randn(2, num_pages, heads, size, dim, generator=random).to(dtype)
    query = torch.randn(count, 2 * heads, dim, generator=random).to(dtype)
    case = Paged(
        query=query,
        keys=keys,
        values=values,
        table=torch.randperm(num_pages, generator=random).int().repeat(count, 1),
        lengths=torch.arange(length - count + 1, length + 1, dtype=torch.int32),
        scale=0.25,
        softcap=None,
        sinks=None,
        window=None,
    )
    held = case
    if kv_dtype:
        keys, values = (stored(x, kv_dtype) for x in (keys, values))
        case = dataclasses.replace(case, keys=keys, values=values)
        held = dataclasses.replace(
            case, keys=kernels.dequantised(keys), values=kernels.dequantised(values)
        )
    rows = Rows(case, held, None, [[visible(n)] * heads for n in case.lengths.tolist()])
    out = kernels.attend(rows.paged, **rows.options)
    if cpu.current() == cpu.REFERENCE:
        return
    assert torch.equal(out, torch.stack([_alone(rows, i) for i in range(count)]))
    if length < 2000:
        assert_close(out, _oracle(rows)[0], dtype, loss=digit_losses(case, held)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [6, 45, 515, 1027, 16386])
def test_rows_of_a_sequence_have_a_retrieval_head_s_scores_of_their_own(
    dtype: torch.dtype, length: int
) -> None:
    """Keys are read once for all rows of a sequence; another sequence stands before them."""
    size, heads, dim, counts = 16, 2, 16, (2, 5)
    random = torch.Generator().manual_seed(length)
    num_pages, num_rows = -(-length // size), sum(counts)
    keys = torch.randn(num_pages, heads, size, dim, generator=random).to(dtype)
    query = torch.randn(num_rows, 2 * heads, dim, generator=random).to(dtype)
    tables = [torch.randperm(num_pages, generator=random).int() for _ in counts]
    table = torch.cat([x.repeat(n, 1) for x, n in zip(tables, counts, strict=True)])
    lengths = torch.cat([torch.arange(length - n + 1, length + 1) for n in counts]).int()
    found = kernels.head_scores(query, keys, table, lengths, scale=0.25)
    for row in range(num_rows):
        one = slice(row, row + 1)
        alone = kernels.head_scores(query[one], keys, table[one], lengths[one], scale=0.25)
        if cpu.current() != cpu.REFERENCE:
            assert torch.equal(found[row], alone[0])
        if length < 2000:
            own = keys[table[row].long()].transpose(0, 1).flatten(1, 2)[:, : lengths[row]]
            queries = float64(query[row]).reshape(heads, 2, dim)
            powers = np.exp(0.25 * queries @ np.swapaxes(float64(own), 1, 2))
            wanted = (powers / powers.sum(-1, keepdims=True)).max(1)
            assert_close(found[row, :, : lengths[row]], wanted, torch.float32)
            assert not found[row, :, lengths[row] :].any()

"""One token per sequence over all, some pages or some tokens, against loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.kernels import ScoreRequest, Selection
from tests.effort import examples
from tests.kernels.paged import Paged, assert_close, paged
from tests.oracle import attention, float64, per_page, token_scores, tokens_of, visible

many = examples(150)


def _wanted(case: Paged, read: list[list[list[int]]]) -> np.ndarray:
    """The oracle's answer when sequence b and KV head h read `read[b][h]`."""
    rows = []
    for row, positions in enumerate(read):
        keys, values = case.tokens(row)
        out, _ = attention(
            float64(case.query[row]),
            keys,
            values,
            positions,
            scale=case.scale,
            softcap=case.softcap,
            sinks=case.sinks64(),
        )
        rows.append(out)
    return np.stack(rows)


def _attend(case: Paged, selection: Selection | None) -> torch.Tensor:
    out = kernels.attend(
        (case.query, case.keys, case.values, case.table, case.lengths),
        scale=case.scale,
        selection=selection,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    assert out.dtype == case.query.dtype
    assert out.shape == (*case.query.shape[:2], case.values.shape[-1])
    return out


@pytest.mark.slow
@given(paged())
@many
def test_everything_or_the_window_is_read(case: Paged) -> None:
    read = [[visible(n, case.window)] * case.num_kv_heads for n in case.lengths.tolist()]
    assert_close(_attend(case, None), _wanted(case, read), case.query.dtype)


@st.composite
def selections(draw: st.DrawFn) -> tuple[Paged, Selection, list[list[list[int]]]]:
    """A case, a selection with the newest token in it, and the tokens that it means."""
    case = draw(paged())
    unit = draw(st.sampled_from((1, case.page_size)))
    heads = draw(st.sampled_from((1, case.num_kv_heads)))
    chosen, read = [], []
    for length in case.lengths.tolist():
        entries = -(-length // unit)
        rows = [
            sorted({*draw(st.sets(st.integers(0, entries - 1), max_size=6)), entries - 1})
            for _ in range(heads)
        ]
        chosen.append(rows)
        tokens = [tokens_of(row, unit, length) for row in rows]
        tokens = tokens * case.num_kv_heads if heads == 1 else tokens
        seen = set(visible(length, case.window))
        read.append([[i for i in row if i in seen] for row in tokens])
    width = max(len(row) for rows in chosen for row in rows) + draw(st.integers(0, 2))
    padded = [[row + [-1] * (width - len(row)) for row in rows] for rows in chosen]
    counts = [[len(row) for row in rows] for rows in chosen]
    selection = Selection(
        torch.tensor(padded, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), unit
    )
    return case, selection, read


@pytest.mark.slow
@given(selections())
@many
def test_only_the_selection_is_read(
    example: tuple[Paged, Selection, list[list[list[int]]]],
) -> None:
    case, selection, read = example
    assert_close(_attend(case, selection), _wanted(case, read), case.query.dtype)


@given(paged(windows=False), st.data())
@many
def test_scores_are_reduced_weights_and_the_output_is_the_same(
    case: Paged, data: st.DataObject
) -> None:
    one = st.builds(
        ScoreRequest,
        st.sampled_from(("max", "sum", "group_max")),
        st.sampled_from((1, case.page_size)),
    )
    requests = tuple(data.draw(st.lists(one, min_size=1, max_size=3)))
    out, scores = kernels.attend_and_score(
        (case.query, case.keys, case.values, case.table, case.lengths),
        requests=requests,
        scale=case.scale,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    lengths = case.lengths.tolist()
    read = [[visible(n)] * case.num_kv_heads for n in lengths]
    assert_close(out, _wanted(case, read), case.query.dtype)
    assert torch.equal(out, _attend(case, None))
    assert len(scores) == len(requests)
    for request, found in zip(requests, scores, strict=True):
        size = case.table.shape[1] * case.page_size // request.unit
        lists = case.num_kv_heads if request.reduce == "group_max" else 1
        assert found.shape == (len(lengths), lists, size)
        assert found.dtype == torch.float32
        wanted = np.zeros(found.shape)
        for row in range(len(lengths)):
            keys, values = case.tokens(row)
            _, weights = attention(
                float64(case.query[row]),
                keys,
                values,
                read[row],
                scale=case.scale,
                softcap=case.softcap,
                sinks=case.sinks64(),
            )
            reduce = request.reduce.removeprefix("group_")
            for place, heads in enumerate(np.split(weights, lists)):
                reduced = per_page(token_scores(heads, reduce), request.unit)
                wanted[row, place, : len(reduced)] = reduced
        assert_close(found, wanted, torch.float32)


@given(paged(windows=False))
@examples(20)
def test_scores_that_are_not_reduced_are_those_of_each_query_head(case: Paged) -> None:
    out, (scores, summed) = kernels.attend_and_score(
        (case.query, case.keys, case.values, case.table, case.lengths),
        requests=(ScoreRequest("none", 1), ScoreRequest("sum", 1)),
        scale=case.scale,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    lengths = case.lengths.tolist()
    everything = [[visible(n)] * case.num_kv_heads for n in lengths]
    assert_close(out, _wanted(case, everything), case.query.dtype)
    wanted = np.zeros((*case.query.shape[:2], case.table.shape[1] * case.page_size))
    for row, length in enumerate(lengths):
        keys, values = case.tokens(row)
        read = [visible(length)] * case.num_kv_heads
        options = {"scale": case.scale, "softcap": case.softcap, "sinks": case.sinks64()}
        _, weights = attention(float64(case.query[row]), keys, values, read, **options)
        wanted[row, :, :length] = weights
    assert_close(scores, wanted, torch.float32)
    assert_close(summed, wanted.sum(1, keepdims=True), torch.float32)

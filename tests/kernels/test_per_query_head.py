"""A list of pages or tokens per query head, and its scores, against loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.kernels import Selection
from tests.effort import examples
from tests.kernels.paged import Paged, assert_close, paged
from tests.oracle import attention, bound, bounds, float64, tokens_of

many = examples(100)


@st.composite
def selections(draw: st.DrawFn) -> tuple[Paged, Selection, list[list[list[int]]]]:
    """A case, lists of every query head with the newest token in them, and what they mean."""
    case = draw(paged(windows=False))
    unit = draw(st.sampled_from((1, case.page_size)))
    chosen = []
    for length in case.lengths.tolist():
        last = -(-length // unit) - 1
        lists = st.sets(st.integers(0, last), max_size=6)
        chosen.append([sorted({*draw(lists), last}) for _ in range(case.query.shape[1])])
    read = [
        [tokens_of(row, unit, length) for row in rows]
        for rows, length in zip(chosen, case.lengths.tolist(), strict=True)
    ]
    width = max(len(row) for rows in chosen for row in rows) + draw(st.integers(0, 2))
    padded = [[row + [-1] * (width - len(row)) for row in rows] for rows in chosen]
    counts = [[len(row) for row in rows] for rows in chosen]
    indices = torch.tensor(padded, dtype=torch.int32)
    return case, Selection(indices, torch.tensor(counts, dtype=torch.int32), unit), read


@given(selections())
@many
def test_every_query_head_reads_its_own_list(
    example: tuple[Paged, Selection, list[list[list[int]]]],
) -> None:
    """Also with a sink of each head, and a softcap."""
    case, selection, read = example
    found = kernels.attend_per_query_head(
        (case.query, case.keys, case.values, case.table, case.lengths),
        selection=selection,
        scale=case.scale,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    options = {"scale": case.scale, "softcap": case.softcap, "sinks": case.sinks64()}
    wanted = np.stack(
        [
            attention(float64(case.query[row]), *case.tokens(row), positions, **options)[0]
            for row, positions in enumerate(read)
        ]
    )
    assert found.dtype == case.query.dtype
    assert_close(found, wanted, case.query.dtype)


@given(paged())
@many
def test_bounds_of_each_query_head_are_the_formula(case: Paged) -> None:
    low, high = (
        torch.full((len(case.keys), case.num_kv_heads, case.keys.shape[3]), torch.nan)
        .to(case.keys.dtype)
        .clone()
        for _ in range(2)
    )
    for row, length in enumerate(case.lengths.tolist()):
        count = -(-length // case.page_size)
        filled = (length - torch.arange(count) * case.page_size).clamp(max=case.page_size)
        kernels.page_bounds(case.keys, low, high, case.table[row, :count].long(), filled)
    found = kernels.bound_scores_per_query_head(case.query, low, high, case.table)
    assert found.dtype == torch.float32
    assert found.shape == (*case.query.shape[:2], case.table.shape[1])
    for row, length in enumerate(case.lengths.tolist()):
        count = -(-length // case.page_size)
        lowest, highest = bounds(case.tokens(row)[0], case.page_size)
        wanted = bound(float64(case.query[row]), lowest, highest, share=False)
        assert_close(found[row, :, :count], np.array(wanted), torch.float32, loss=1e-4)


def test_scores_over_the_prompt_are_a_softmax_of_its_own() -> None:
    random = torch.Generator().manual_seed(0)
    products = torch.randn(3, 4, 11, generator=random)
    prompts = torch.tensor([11, 5, 1], dtype=torch.int32)
    found = kernels.prompt_scores(products.softmax(2), prompts)
    assert found.shape == (3, 1, 11)
    for row, length in enumerate(prompts.tolist()):
        wanted = products[row, :, :length].softmax(1).amax(0)
        assert (found[row, 0, :length] - wanted).abs().max() < 1e-6
        assert (found[row, 0, length:] == 0).all()


def test_a_head_without_weight_on_the_prompt_scores_nothing() -> None:
    weights = torch.tensor([[[0.0, 0.0, 1.0], [0.5, 0.25, 0.25]]])
    found = kernels.prompt_scores(weights, torch.tensor([2], dtype=torch.int32))
    assert found[0, 0].tolist() == pytest.approx([2 / 3, 1 / 3, 0.0])

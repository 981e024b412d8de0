"""Attention over tokens at arbitrary positions of a sequence, against loops in float64."""

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
from tests.kernels.test_prefill import _LOSS
from tests.oracle import attention, float64


def _subset(data: st.DataObject, length: int) -> list[int]:
    return sorted(data.draw(st.sets(st.integers(0, length - 1), min_size=1)))


def _attention(case: Paged, row: int, query: torch.Tensor, places: list[int]) -> tuple:  # type: ignore[type-arg]
    keys, values = case.tokens(row)
    return attention(
        float64(query),
        keys,
        values,
        [places] * case.num_kv_heads,
        scale=case.scale,
        softcap=case.softcap,
        sinks=case.sinks64(),
    )


@given(paged(max_batch=1), st.data())
@examples(100)
def test_queries_see_the_chosen_tokens_that_are_not_after_them(
    case: Paged, data: st.DataObject
) -> None:
    length = int(case.lengths[0])
    chosen = _subset(data, length)
    positions = sorted(data.draw(st.sets(st.sampled_from(chosen), min_size=1)))
    random = torch.Generator().manual_seed(length)
    shape = (len(positions), *case.query.shape[1:])
    query = torch.randn(shape, generator=random).to(case.query.dtype)
    found = kernels.sparse_prefill(
        query,
        case.keys,
        case.values,
        case.table[0].long(),
        torch.tensor(positions),
        torch.tensor(chosen),
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    wanted = []
    for row, position in zip(query, positions, strict=True):
        first = 0 if case.window is None else position - case.window + 1
        places = [token for token in chosen if first <= token <= position]
        wanted.append(_attention(case, 0, row, places)[0])
    assert_close(found, np.stack(wanted), query.dtype, loss=_LOSS[query.dtype])


@pytest.mark.slow
@given(paged(windows=False), st.data())
@examples(100)
def test_scores_of_chosen_tokens_stand_at_their_places(case: Paged, data: st.DataObject) -> None:
    rows = [_subset(data, int(length)) for length in case.lengths]
    width = max(map(len, rows))
    indices = torch.tensor([[row + [-1] * (width - len(row))] for row in rows], dtype=torch.int32)
    counts = torch.tensor([[len(row)] for row in rows], dtype=torch.int32)
    requests = (
        ScoreRequest("max", 1),
        ScoreRequest("sum", case.page_size),
        ScoreRequest("group_max", 1),
    )
    out, (most, total, groups) = kernels.attend_and_score_chosen(
        (case.query, case.keys, case.values, case.table, case.lengths),
        selection=Selection(indices, counts, 1),
        requests=requests,
        scale=case.scale,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    size, dtype = case.page_size, case.query.dtype
    for b, places in enumerate(rows):
        wanted, weights = _attention(case, b, case.query[b], places)
        assert_close(out[b], wanted, dtype)
        by_token = np.zeros(most.shape[2])
        by_group = np.zeros(groups.shape[1:])
        sums = np.zeros(total.shape[2])
        for token in places:
            heads = [weights[head][token] for head in range(len(weights))]
            by_token[token] = max(heads)
            by_group[:, token] = [max(group) for group in np.split(np.array(heads), len(by_group))]
            sums[token // size] += sum(heads)
        assert_close(most[b, 0], by_token, torch.float32)
        assert_close(groups[b], by_group, torch.float32)
        assert_close(total[b, 0], sums, torch.float32)


@given(paged(windows=False), st.data())
@examples(20)
def test_head_scores_are_over_the_chosen_tokens_alone(case: Paged, data: st.DataObject) -> None:
    """Softmax over these, the largest of each group; below every weight where nothing is."""
    rows = [_subset(data, int(length)) for length in case.lengths]
    width = max(map(len, rows))
    indices = torch.tensor([[row + [-1] * (width - len(row))] for row in rows], dtype=torch.int32)
    counts = torch.tensor([[len(row)] for row in rows], dtype=torch.int32)
    found = kernels.head_scores_chosen(
        case.query,
        case.keys,
        case.table,
        case.lengths,
        selection=Selection(indices, counts, 1),
        scale=case.scale,
    )
    wanted = np.full(found.shape, -1.0)
    for b, places in enumerate(rows):
        keys, values = case.tokens(b)
        read = [places] * case.num_kv_heads
        weights = attention(float64(case.query[b]), keys, values, read, scale=case.scale)[1]
        for kv, group in enumerate(np.split(weights, case.num_kv_heads)):
            for token in places:
                wanted[b, kv, token] = max(group[:, token])
    assert_close(found, wanted, torch.float32)


@given(paged(windows=False), st.data())
@examples(30)
def test_keys_without_a_page_count_like_others(case: Paged, data: st.DataObject) -> None:
    """What their pages hold is never read."""
    rows = [_subset(data, int(length)) for length in case.lengths]
    width = max(map(len, rows))
    indices = torch.tensor([[row + [-1] * (width - len(row))] for row in rows], dtype=torch.int32)
    counts = torch.tensor([[len(row)] for row in rows], dtype=torch.int32)
    chosen = {"selection": Selection(indices, counts, 1), "scale": case.scale}
    wanted = kernels.head_scores_chosen(case.query, case.keys, case.table, case.lengths, **chosen)
    most, size, keys = int(case.lengths.max()), case.page_size, case.keys.clone()
    table = torch.full((len(rows), data.draw(st.integers(1, most))), -1, dtype=torch.int32)
    apart: list[torch.Tensor] = []
    for b, places in enumerate(rows):
        for token in places:
            if token < table.shape[1] and data.draw(st.booleans()):
                page = int(case.table[b, token // size])
                table[b, token] = len(apart)
                apart.append(case.keys[page, :, token % size])
    for b, token in (table >= 0).nonzero().tolist():
        keys[int(case.table[b, token // size]), :, token % size] = float("nan")
    unpaged = torch.stack([*apart, torch.full_like(case.keys[0, :, 0], float("nan"))]), table
    found = kernels.head_scores_chosen(
        case.query, keys, case.table, case.lengths, unpaged=unpaged, **chosen
    )
    assert_close(found, wanted.double().numpy(), torch.float32)

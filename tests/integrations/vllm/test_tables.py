"""Attention over the tables of a selection is attention over the selection."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.integrations.vllm.step_rows import Tables, tables_of
from keyhole.kernels import Selection
from keyhole.policies.base import Step
from tests.integrations.vllm.steps import make_step
from tests.oracle import attention, float64, in_order

PAGE, HKV, G, D = 4, 2, 3, 8


def attend_tables(query: torch.Tensor, pages: list[torch.Tensor], tables: Tables) -> torch.Tensor:
    """What vLLM's kernel does with tables: everything in them, each list a sequence."""
    B, Hq, width = query.shape
    if tables.lists == 1:
        return kernels.attend((query, *pages, tables.page_table, tables.lengths), scale=0.3)
    pools = [x.reshape(-1, 1, *x.shape[2:]) for x in pages]
    queries = query.reshape(B * tables.lists, Hq // tables.lists, width)
    out = kernels.attend((queries, *pools, tables.page_table, tables.lengths), scale=0.3)
    return out.view(B, Hq, width)


@pytest.mark.slow
@pytest.mark.parametrize("lists", [1, HKV, HKV * G])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_tables_read_what_was_selected(lists: int, lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    step, keys, values = make_step(lengths, PAGE, HKV, D, generator)
    query = torch.randn(len(lengths), HKV * G, D, generator=generator)
    selection = random_selection(step, lists, generator)
    tables = tables_of(selection, step, HKV)
    got = attend_tables(query, [keys, values], tables)
    for row, length in enumerate(lengths):
        table = step.page_table[row].tolist()
        read = [
            [i for i in range(length) if i // PAGE in selection.indices[row, h].tolist()]
            for h in range(lists)
        ]
        read = read * HKV if lists == 1 else read
        cached = (in_order(x, table, length) for x in (keys, values))
        expected, _ = attention(float64(query[row]), *cached, read, scale=0.3)
        torch.testing.assert_close(got[row].double(), torch.from_numpy(expected), atol=1e-4, rtol=0)
    assert int(tables.lengths.max()) <= tables.max_length
    assert int(tables.pages) == int(selection.counts.sum())


def random_selection(step: Step, lists: int, generator: torch.Generator) -> Selection:
    """Pages at random, the newest among them, as policies select."""
    width = 4
    scores = torch.rand(len(step.lengths), lists, step.page_table.shape[1], generator=generator)
    return kernels.top_k(scores, step.pages, width, PAGE, last=1)

"""Page summaries scored in place: the formula in float64, on pages in any order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keyhole import kernels
from keyhole.kernels import cpu
from tests.effort import examples
from tests.kernels.paged import DTYPES, assert_close
from tests.oracle import float64

#: Query heads, KV heads, numbers of a key: MHA, groups of 3, 4 and 7, MQA, MLA.
HEADS = ((2, 2, 16), (6, 2, 64), (8, 2, 40), (7, 1, 80), (20, 1, 576))


@dataclass(frozen=True)
class Summed:
    """A batch of 3, 1 and M pages; NaN is what no sequence has."""

    query: Tensor
    summaries: Tensor
    table: Tensor
    valid: Tensor


@st.composite
def summed(draw: st.DrawFn) -> Summed:
    (heads, kv_heads, dim), dtype = draw(st.sampled_from(HEADS)), draw(st.sampled_from(DTYPES))
    of_page = draw(st.sampled_from((1, 2, 3, 16)))
    most = draw(st.sampled_from((3, 16, 33)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    counts = [3, 1, most]
    table = torch.zeros(3, most, dtype=torch.int32)
    order = torch.randperm(sum(counts), generator=random).split(counts)
    for row, pages in enumerate(order):
        table[row, : len(pages)] = pages
    # The last page may be begun only.
    valid = torch.tensor([count * of_page - draw(st.integers(0, of_page - 1)) for count in counts])
    summaries = torch.full((sum(counts), of_page, kv_heads, dim), torch.nan)
    for pages, number in zip(order, valid.tolist(), strict=True):
        numbers = torch.randn(number, kv_heads, dim, generator=random)
        for i in range(number):
            summaries[pages[i // of_page], i % of_page] = numbers[i]
    query = torch.randn(3, heads, dim, generator=random)
    return Summed(query.to(dtype), summaries.to(dtype), table, valid.int())


@given(summed())
@examples(60)
def test_scores_are_products_with_the_summaries_of_pages(case: Summed) -> None:
    found = kernels.summary_scores(case.query, case.summaries, case.table, case.valid)
    (_, heads, _), (_, of_page, kv_heads, _) = case.query.shape, case.summaries.shape
    assert found.dtype == torch.float32
    assert found.shape == (3, heads, case.table.shape[1] * of_page)
    query, summaries = float64(case.query), float64(case.summaries)
    for row, number in enumerate(case.valid.tolist()):
        for entry in range(number):
            vectors = summaries[int(case.table[row, entry // of_page]), entry % of_page]
            wanted = (query[row] * vectors.repeat(heads // kv_heads, 0)).sum(-1)
            assert_close(found[row, :, entry], wanted, torch.float32, loss=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.int16, torch.int32])
@pytest.mark.parametrize("size", [1, 16])
def test_a_token_gets_the_score_of_what_it_belongs_to(size: int, kind: torch.dtype) -> None:
    random = torch.Generator().manual_seed(size)
    pages, heads, most = torch.randperm(50, generator=random), 2, 40
    table = torch.stack([pages[:most], pages[50 - most :]]).int()
    scores = torch.randn(2, heads, 7, generator=random)
    numbers = torch.randint(0, 7, (50, heads, size), generator=random).to(kind)
    first = 5
    for ends in ((most * size, 11), (0, 3), (5, 6)):
        # What belongs to nothing may have any number.
        broken = numbers.clone()
        for row, end in enumerate(ends):
            for token in range(most * size):
                page = table[row, token // size]
                if page not in table[1 - row] and not first <= token < end:
                    broken[page, :, token % size] = -32768
        found = kernels.spread_scores(
            scores, broken, table, first, torch.tensor(ends, dtype=torch.int32)
        )
        assert found.shape == (2, heads, most * size)
        for row, end in enumerate(ends):
            for head in range(heads):
                for token in range(most * size):
                    number = int(numbers[table[row, token // size], head, token % size])
                    there = first <= token < end
                    wanted = scores[row, head, number] if there else torch.inf
                    assert found[row, head, token] == wanted


@pytest.mark.parametrize("kind", [torch.int16, torch.int32])
def test_a_number_of_no_entry_reads_no_other_memory(kind: torch.dtype) -> None:
    """It read the scores of the next head, or what lies before and after all scores."""
    scores = torch.arange(12.0).reshape(2, 2, 3)
    numbers = torch.tensor([0, 2, 3, -1, torch.iinfo(kind).max, torch.iinfo(kind).min, 1, 0])
    pages = numbers.to(kind).reshape(1, 1, 8).repeat(1, 2, 1)
    table, ends = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([8, 8], dtype=torch.int32)
    found = kernels.spread_scores(scores, pages, table, 0, ends)
    there = (numbers >= 0) & (numbers < 3)
    assert torch.equal(found[:, :, there], scores[:, :, numbers[there]])
    assert found[:, :, ~there].isposinf().all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"numbers": torch.zeros(1, 2, 8, dtype=torch.int64)},
        {"numbers": torch.zeros(1, 1, 8, dtype=torch.int32)},
        {"page_table": torch.zeros(1, 1, dtype=torch.int32)},
        {"ends": torch.zeros(1, dtype=torch.int32)},
    ],
)
def test_tokens_of_other_sizes_are_not_read(
    wrong: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.extension is None:
        pytest.skip("the reference checks shapes by itself")
    given = {
        "scores": torch.zeros(2, 2, 3),
        "numbers": torch.zeros(1, 2, 8, dtype=torch.int32),
        "page_table": torch.zeros(2, 1, dtype=torch.int32),
        "first": 0,
        "ends": torch.zeros(2, dtype=torch.int32),
    }
    called: list[object] = []
    monkeypatch.setattr(cpu.extension, "spread_scores", lambda *x: called.append(x))
    cpu.spread_scores(**given)  # type: ignore[arg-type]
    assert called
    with pytest.raises(AssertionError):
        cpu.spread_scores(**given | wrong)  # type: ignore[arg-type]


def test_a_broken_summary_shows_in_its_own_scores_only() -> None:
    summaries = torch.ones(4, 2, 3, 40)
    summaries[1, 0, 2, 39] = summaries[3, 1, 0, 0] = torch.nan
    table = torch.arange(4, dtype=torch.int32)[None]
    found = kernels.summary_scores(torch.ones(1, 6, 40), summaries, table, torch.tensor([8]).int())
    wanted = summaries.flatten(0, 1).isnan().any(-1).T.repeat_interleave(2, 0)
    assert torch.equal(found[0].isnan(), wanted)

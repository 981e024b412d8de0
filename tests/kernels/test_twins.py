"""Long sequences and large heads, where a kernel cuts its work into parts, against the twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keyhole import kernels
from keyhole.kernels import ScoreRequest, Selection, cpu, reference
from keyhole.kernels.reference import quantised
from tests.effort import examples

PAGE = 16
#: Relative to the largest number: sums in another order, and one rounding to the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
DTYPES = st.sampled_from(tuple(TOLERANCE))
#: Around the places where a sequence gets one more part, or parts of another size.
LENGTHS = st.sampled_from((1, 15, 16, 17, 255, 256, 257, 511, 513, 4097, 8191, 8193, 9000))
SHAPES = st.sampled_from(
    (
        (1, 1, 128, 128),
        (2, 1, 64, 64),
        (2, 3, 32, 32),
        (1, 7, 80, 80),
        (2, 4, 256, 256),
        (1, 16, 576, 512),
        (1, 33, 96, 40),
    )
)


class Cache:
    """Random pages of sequences of different lengths; NaN where no token is."""

    def __init__(self, lengths: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        heads, group, dim, value_dim = shape
        random = torch.Generator().manual_seed(sum(lengths))
        counts = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(sum(counts), generator=random).split(counts)
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        keys = torch.randn(sum(counts), heads, PAGE, dim, generator=random)
        values = torch.randn(sum(counts), heads, PAGE, value_dim, generator=random)
        for row, (pages, length) in enumerate(zip(order, lengths, strict=True)):
            self.table[row, : len(pages)] = pages
            filled = (length - 1) % PAGE + 1
            keys[pages[-1], :, filled:] = values[pages[-1], :, filled:] = torch.nan
        self.keys = keys.to(dtype)
        # MLA: the values are part of the keys.
        self.values = self.keys[..., :value_dim] if value_dim > 256 else values.to(dtype)
        self.query = torch.randn(len(lengths), heads * group, dim, generator=random).to(dtype)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.scale = dim**-0.5
        self.random = random

    @property
    def paged(self) -> tuple[Tensor, ...]:
        return self.query, self.keys, self.values, self.table, self.lengths

    def selection(self, k: int, unit: int, heads: int) -> Selection:
        """The best of random scores."""
        entries = self.table.shape[1] * PAGE // unit
        scores = torch.randn(len(self.lengths), heads, entries, generator=self.random)
        valid = (self.lengths + unit - 1) // unit
        return reference.top_k(scores, valid, k, unit, last=1)


def check(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert not found.isnan().any()
    allowed = TOLERANCE[dtype] * wanted.float().abs().max() + 1e-6
    assert (found.float() - wanted.float()).abs().max() <= allowed


caches = st.builds(Cache, st.lists(LENGTHS, min_size=1, max_size=3), SHAPES, DTYPES)
options = st.fixed_dictionaries(
    {"softcap": st.sampled_from((None, 20.0)), "sinks": st.sampled_from((False, True))}
)


def _with_sinks(cache: Cache, given: dict[str, object]) -> dict[str, object]:
    heads = cache.query.shape[1]
    return given | {"sinks": torch.linspace(-1, 3, heads) if given["sinks"] else None}


@given(caches, st.sampled_from((None, 1, 100, 5000)), options)
@examples(40)
def test_attend_to_everything_or_a_window(
    cache: Cache, window: int | None, given: dict[str, object]
) -> None:
    given = _with_sinks(cache, given) | {"scale": cache.scale, "window": window}
    found = kernels.attend(cache.paged, **given)
    check(found, reference.attend(cache.paged, **given), found.dtype)


@given(caches, st.sampled_from((1, 40, 700)), st.sampled_from((1, PAGE)), st.booleans(), options)
@examples(60)
def test_attend_to_a_selection(
    cache: Cache, k: int, unit: int, shared: bool, given: dict[str, object]
) -> None:
    selection = cache.selection(k, unit, 1 if shared else cache.keys.shape[1])
    given = _with_sinks(cache, given) | {"scale": cache.scale, "selection": selection}
    found = kernels.attend(cache.paged, **given)
    check(found, reference.attend(cache.paged, **given), found.dtype)


@given(caches, options)
@examples(40)
def test_attend_and_score(cache: Cache, given: dict[str, object]) -> None:
    reduces = ("max", "sum", "group_max")
    requests = tuple(ScoreRequest(reduce, unit) for reduce in reduces for unit in (PAGE, 1))
    given = _with_sinks(cache, given) | {"scale": cache.scale, "requests": requests}
    found, scores = kernels.attend_and_score(cache.paged, **given)
    wanted, twins = reference.attend_and_score(cache.paged, **given)
    check(found, wanted, found.dtype)
    for score, twin in zip(scores, twins, strict=True):
        check(score, twin, torch.float32)


@given(caches)
@examples(40)
def test_head_scores(cache: Cache) -> None:
    query, keys, _, table, lengths = cache.paged
    found = kernels.head_scores(query, keys, table, lengths, scale=cache.scale)
    check(found, reference.head_scores(query, keys, table, lengths, scale=cache.scale), found.dtype)
    for row, length in zip(found, lengths.tolist(), strict=True):
        assert not row[:, length:].any()


@given(caches)
@examples(40)
def test_head_scores_and_bounds_of_keys_in_columns(cache: Cache) -> None:
    """vLLM's CPU pages hold keys as [D, page_size]: the kernels read them without a copy."""
    query, keys, _, table, lengths = cache.paged
    columns = keys.mT.contiguous().mT
    assert cpu.current() == cpu.REFERENCE or cpu.takes_columns(query, columns)
    found = kernels.head_scores(query, columns, table, lengths, scale=cache.scale)
    check(found, reference.head_scores(query, keys, table, lengths, scale=cache.scale), found.dtype)
    for row, length in zip(found, lengths.tolist(), strict=True):
        assert not row[:, length:].any()
    last = [int(row[(n - 1) // PAGE]) for row, n in zip(table, lengths.tolist(), strict=True)]
    where = torch.tensor(last), (lengths.long() - 1) % PAGE + 1
    bounds = [torch.full_like(keys[:, :, 0], torch.inf) for _ in range(4)]
    kernels.page_bounds(columns, bounds[0], bounds[1], *where)
    reference.page_bounds(keys, bounds[2], bounds[3], *where)
    assert torch.equal(bounds[0], bounds[2])
    assert torch.equal(bounds[1], bounds[3])


@given(caches, st.sampled_from((1, 5, 100, 300)), st.sampled_from((None, 7, 200)), options)
@examples(30)
def test_prefill(cache: Cache, count: int, window: int | None, given: dict[str, object]) -> None:
    length = int(cache.lengths[0])
    count = min(count, length)
    query = torch.randn(count, *cache.query.shape[1:], generator=cache.random).to(cache.keys.dtype)
    paged = (query, cache.keys, cache.values, cache.table[0].long(), length - count)
    given = _with_sinks(cache, given) | {"scale": cache.scale, "window": window}
    found = kernels.prefill(*paged, **given)
    check(found, reference.prefill(*paged, **given), found.dtype)


@given(caches)
@examples(30)
def test_bounds_and_their_scores(cache: Cache) -> None:
    query, keys, _, table, lengths = cache.paged
    shape = (keys.shape[0], keys.shape[1], keys.shape[3])
    pages = [row[: -(-n // PAGE)] for row, n in zip(table, lengths.tolist(), strict=True)]
    filled = [torch.full_like(row, PAGE) for row in pages]
    for row, length in zip(filled, lengths.tolist(), strict=True):
        row[-1] = (length - 1) % PAGE + 1
    where = torch.cat(pages).long(), torch.cat(filled).long()
    bounds = [torch.full(shape, torch.nan, dtype=keys.dtype) for _ in range(4)]
    kernels.page_bounds(keys, bounds[0], bounds[1], *where)
    reference.page_bounds(keys, bounds[2], bounds[3], *where)
    assert torch.equal(bounds[0], bounds[2])
    assert torch.equal(bounds[1], bounds[3])
    found = kernels.bound_scores(query, bounds[0], bounds[1], table)
    wanted = reference.bound_scores(query, bounds[0], bounds[1], table)
    check(found, wanted, torch.float32)


@given(st.integers(1, 5000), st.integers(1, 600), st.sampled_from((1, 3, 1000)), st.integers(0, 99))
@examples(60)
def test_top_k_of_long_rows(n: int, k: int, distinct: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, n, generator=random).mul(distinct).round()
    scores[scores > 2 * distinct] = torch.inf
    scores[scores < -2 * distinct] = -torch.inf
    scores[:, :, :: max(1, n // 3)] = torch.nan
    valid = torch.tensor([n, (n + 1) // 2], dtype=torch.int32)
    found = kernels.top_k(scores, valid, k, 1, last=1)
    wanted = reference.top_k(scores, valid, k, 1, last=1)
    assert torch.equal(found.indices, wanted.indices)
    assert torch.equal(found.counts, wanted.counts)


@given(
    st.sampled_from((1, 200, 4097)),
    st.sampled_from((1, 64, 1000)),
    st.sampled_from((0.1, 0.5, 0.9, 0.999)),
    st.sampled_from((2, 50, 10000)),
    st.sampled_from((0, 70)),
)
@examples(60)
def test_trim_of_long_rows(n: int, k: int, share: float, distinct: int, least: int) -> None:
    random = torch.Generator().manual_seed(n * k + distinct)
    # Whole numbers, some below 0: their sums are exact in any order.
    scores = torch.randint(-1, distinct, (3, 2, n), generator=random).float()
    valid = torch.tensor([n, max(1, n // 2), 1], dtype=torch.int32)
    scores[0, 1, n // 3] = torch.nan  # then no sum is known
    for b, count in enumerate(valid.tolist()):
        scores[b, :, count:] = torch.nan  # nobody looks here
    places = {"first": min(4, k - 1), "last": 1}
    chosen = reference.top_k(scores, valid, k, 1, **places)
    found = kernels.top_p(chosen, scores, valid, share, least=least, **places)
    wanted = reference.top_p(chosen, scores, valid, share, least=least, **places)
    assert torch.equal(found.indices, wanted.indices)
    assert torch.equal(found.counts, wanted.counts)
    assert found.indices.dtype == found.counts.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_in_16_bits_are_compared_as_what_they_are(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(4)
    scores = torch.randint(0, 2, (2, 3, 300), generator=random).to(dtype)  # sums are exact
    valid = torch.tensor([300, 170], dtype=torch.int32)
    chosen = kernels.top_k(scores, valid, 90, 1, last=1)
    wanted = reference.top_k(scores.float(), valid, 90, 1, last=1)
    assert torch.equal(chosen.indices, wanted.indices)
    found = kernels.top_p(chosen, scores, valid, 0.25, last=1)
    wanted = reference.top_p(wanted, scores.float(), valid, 0.25, last=1)
    assert torch.equal(found.indices, wanted.indices)
    assert (found.counts < 90).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_numbers_are_read_and_written_exactly(dtype: torch.dtype) -> None:
    """One token has all the weight, so its value comes out; two equal ones give a mean, rounded."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.abs() <= torch.finfo(dtype).max / 2]  # so that sums are finite too
    numbers = numbers[: len(numbers) // 256 * 256].view(-1, 1, 1, 256)
    other = numbers.roll(1, 0)
    ones = torch.ones(len(numbers), 1, 1, 256, dtype=dtype)
    pair = torch.cat([numbers, other], 2)
    table = torch.arange(len(numbers), dtype=torch.int32)[:, None]
    query = torch.zeros(len(numbers), 1, 256, dtype=dtype)
    for values, wanted in (
        (numbers, numbers[:, :, 0]),
        (pair, ((numbers.double() + other.double()) / 2).float()[:, :, 0].to(dtype)),
    ):
        size = values.shape[2]
        lengths = torch.full((len(numbers),), size, dtype=torch.int32)
        found = kernels.attend(
            (query, ones.expand(-1, -1, size, -1), values, table, lengths), scale=1.0
        )
        # The processor's own conversion to bfloat16 takes subnormal numbers for zero.
        least = torch.finfo(dtype).tiny if dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=least)


def test_a_result_depends_neither_on_the_batch_nor_on_threads(path: str) -> None:
    if path == "reference":
        pytest.skip("torch's products may differ with the batch")
    cache = Cache([5000, 17, 700], (2, 4, 64, 64), torch.float32)
    together = kernels.attend(cache.paged, scale=1.0)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for row in range(3):
            one = slice(row, row + 1)
            alone = kernels.attend(
                (cache.query[one], cache.keys, cache.values, cache.table[one], cache.lengths[one]),
                scale=1.0,
            )
            assert torch.equal(alone, together[one])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.int8])
@pytest.mark.parametrize("rows", [1, 3])
def test_heads_that_are_read_together_have_the_results_that_each_has_alone(
    path: str, rows: int, dtype: torch.dtype
) -> None:
    """One thread reads several KV heads page by page; of 64 threads each reads one head."""
    if path == "reference":
        pytest.skip("torch's products may differ with the number of threads")
    kept = torch.float32 if dtype == torch.int8 else dtype
    cache = Cache([2500] * rows + [40], (6, 4, 64, 64), kept)
    for row in range(rows):  # of one sequence, as speculation verifies them
        cache.table[row] = cache.table[0]
        cache.lengths[row] = 2500 - rows + 1 + row
    if dtype == torch.int8:
        cache.keys, cache.values = (
            quantised.quantise(x.nan_to_num(), dtype) for x in (cache.keys, cache.values)
        )
    pages = torch.arange(0, 150, 3).repeat(rows + 1, 1, 1)
    pages[-1] = -1
    pages[-1, :, :2] = torch.tensor([0, 2])
    counts = torch.tensor([[pages.shape[-1]]] * rows + [[2]])
    chosen = Selection(pages.int(), counts.int(), PAGE)

    def results() -> list[Tensor]:
        out, scores = kernels.attend_and_score(
            cache.paged, requests=(ScoreRequest("group_max", 1),), scale=cache.scale
        )
        options: tuple[dict[str, Any], ...] = ({"window": 1700}, {"selection": chosen})
        some = [kernels.attend(cache.paged, scale=cache.scale, **one) for one in options]
        return [out, *scores, *some]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = results()
        torch.set_num_threads(64)
        alone = results()
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(together, alone, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_prompts_row_does_not_depend_on_its_chunk(path: str, dtype: torch.dtype) -> None:
    if path == "reference":
        pytest.skip("torch's products may differ with the number of rows")
    cache = Cache([300], (2, 3, 80, 80), dtype)
    query = torch.randn(300, 6, 80, generator=cache.random).to(dtype)
    pages = (cache.keys, cache.values, cache.table[0].long())
    whole = kernels.prefill(query, *pages, 0, scale=cache.scale)
    for start, end in ((0, 1), (0, 299), (1, 4), (17, 64), (250, 300), (299, 300)):
        chunk = kernels.prefill(query[start:end], *pages, start, scale=cache.scale)
        assert torch.equal(chunk, whole[start:end])


def test_a_broken_key_shows_in_the_result() -> None:
    cache = Cache([300], (2, 2, 64, 64), torch.float32)
    cache.keys[cache.table[0, 3], 1, 5, 7] = torch.nan
    found = kernels.attend(cache.paged, scale=1.0)
    assert found[:, 2:].isnan().any(-1).all()
    assert not found[:, :2].isnan().any()


@given(
    st.integers(1, 36),
    st.sampled_from((1, 15, 16, 17, 100)),
    st.sampled_from((1, 31, 32, 80, 256, 300)),
    DTYPES,
    st.booleans(),
)
@examples(60)
def test_linear(
    tokens: int, outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool
) -> None:
    random = torch.Generator().manual_seed(tokens * outputs + inputs)
    x, weight, bias = (
        torch.randn(shape, generator=random).to(dtype)
        for shape in ((2, tokens, inputs), (outputs, inputs), (outputs,))
    )
    found = kernels.linear(x, weight, bias if with_bias else None)
    wanted = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    check(found, wanted.to(dtype), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_has_the_outputs_that_it_has_alone(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(min(cpu.most_tokens(dtype), 300), 320, generator=random).to(dtype)
    weight = torch.randn(40, 320, generator=random).to(dtype)
    if cpu.current() == cpu.REFERENCE:
        pytest.skip("torch's products depend on the batch")
    together = kernels.linear(x, weight)
    alone = [kernels.linear(row[None], weight)[0] for row in x]
    assert torch.equal(together, torch.stack(alone))
    assert kernels.linear(x[:0], weight).shape == (0, 40)


def test_linear_with_a_part_of_a_larger_weight() -> None:
    whole, x = torch.arange(96.0).view(4, 24), torch.ones(1, 8)
    assert kernels.linear(x, whole[:, 4:12]).tolist() == (x @ whole[:, 4:12].T).tolist()

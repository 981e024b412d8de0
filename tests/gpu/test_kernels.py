"""The Triton kernels that attend, score and choose, equal to their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keyhole.kernels import ScoreRequest, Selection, reference
from tests.gpu.operands import (
    COMPILED,
    DEVICE,
    INTERPRETED,
    LATENTS,
    LENGTHS,
    MARKS,
    MLA,
    PAGE,
    PROMPTS,
    SHAPES,
    Cache,
    cases,
    check,
    run,
)

pytestmark = MARKS
#: The row whose tokens are a prompt: a few blocks, and not the longest, which has many on a GPU.
_PROMPT = LENGTHS.index(150 if DEVICE == "cpu" else 300)


@pytest.mark.one_in(3)
@cases(SHAPES)
@pytest.mark.parametrize("window", [None, 20])
def test_attend_to_everything_or_a_window(
    shape: tuple[int, ...], dtype: torch.dtype, window: int | None
) -> None:
    cache = Cache(shape, dtype, size=5 if window is None else PAGE)
    softcap, sinks = (None, None) if window is None else (5.0, cache.sinks)
    options = {"scale": cache.scale, "window": window, "softcap": softcap, "sinks": sinks}
    found = run("attend", cache.paged, **options)
    check(found, reference.attend(cache.paged, **options), dtype)


@pytest.mark.one_in(3)
@cases(SHAPES[:3])
@pytest.mark.parametrize("unit", [1, PAGE])
@pytest.mark.parametrize("per_head", [False, True])
def test_attend_to_a_selection(
    shape: tuple[int, ...], dtype: torch.dtype, unit: int, per_head: bool
) -> None:
    cache = Cache(shape, dtype)
    chosen = cache.selection(144 // unit, unit, shape[0] if per_head else 1)
    compare_selected(cache, chosen)
    if not per_head:
        compare_selected(cache, chosen, window=50, softcap=5.0, sinks=cache.sinks)


def compare_selected(
    cache: Cache,
    chosen: Selection,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    options |= {"selection": chosen, "scale": cache.scale}
    found = run("attend", cache.paged, **options)
    check(found, reference.attend(cache.paged, **options), cache.dtype)


@pytest.mark.one_in(2)
@cases(LATENTS)
@pytest.mark.parametrize("unit", [1, PAGE])
def test_latents_with_a_selection(shape: tuple[int, ...], dtype: torch.dtype, unit: int) -> None:
    cache = Cache(shape, dtype)
    compare_selected(cache, cache.selection(144 // unit, unit, 1))


@pytest.mark.one_in(2)
@cases(LATENTS)
def test_latents_with_a_selection_per_query_head(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """As if each query head had keys of its own, which all lie in one place: a stride of 0."""
    cache = Cache(shape, dtype)
    heads = shape[1]
    cache.keys, cache.values = (x.expand(-1, heads, -1, -1) for x in (cache.keys, cache.values))
    assert cache.keys.stride(1) == cache.values.stride(1) == 0
    compare_selected(cache, cache.selection(48, 1, heads))


@pytest.mark.one_in(5)
@cases(PROMPTS)
@pytest.mark.parametrize("quantised", [None, torch.int8, torch.uint8])
@pytest.mark.parametrize("unit", [2 * PAGE] if INTERPRETED else [2 * PAGE, 8 * PAGE])
def test_a_prompt_over_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, quantised: torch.dtype | None, unit: int
) -> None:
    cache = Cache(shape, dtype)
    softcap, sinks = (None, None) if quantised is None else (5.0, cache.sinks)
    if quantised is not None and shape[2:] not in MLA:
        cache.quantise(quantised)
    length = LENGTHS[_PROMPT]
    start = 91 if INTERPRETED else 27  # in the middle of a block
    heads, rows = shape[0] * shape[1], -(-length // unit) - start // unit
    scores = torch.randn(rows, heads, -(-length // unit), generator=cache.random).to(DEVICE)
    visible = torch.arange(rows, device=DEVICE, dtype=torch.int32) + start // unit + 1
    options = {
        "blocks": reference.top_k(scores, visible, 2, unit, last=1),
        "scale": cache.scale,
        "softcap": softcap,
        "sinks": sinks,
    }
    query = torch.randn(length - start, heads, shape[2], generator=cache.random)
    given = (query.to(DEVICE, dtype), cache.keys, cache.values, cache.table[_PROMPT].long(), start)
    found = run("block_sparse_prefill", *given, **options)
    check(found, reference.block_sparse_prefill(*given, **options), dtype)


@pytest.mark.one_in(5)
@cases(PROMPTS)
@pytest.mark.parametrize("quantised", [None, torch.int8, torch.uint8])
@pytest.mark.parametrize("window", [None, 40])
def test_tokens_at_any_positions_over_chosen_ones(
    shape: tuple[int, ...], dtype: torch.dtype, quantised: torch.dtype | None, window: int | None
) -> None:
    cache = Cache(shape, dtype)
    softcap, sinks = (None, None) if quantised is None else (5.0, cache.sinks)
    if quantised is not None and shape[2:] not in MLA:
        cache.quantise(quantised)
    heads, order = shape[0] * shape[1], torch.randperm(LENGTHS[_PROMPT], generator=cache.random)
    tokens = order[: LENGTHS[_PROMPT] * 2 // 3].sort().values
    positions = order[: LENGTHS[_PROMPT] // 3].sort().values
    options = {"scale": cache.scale, "window": window, "softcap": softcap, "sinks": sinks}
    query = torch.randn(len(positions), heads, shape[2], generator=cache.random)
    given = (query.to(DEVICE, dtype), cache.keys, cache.values, cache.table[_PROMPT].long())
    chosen = (positions.to(DEVICE), tokens.to(DEVICE))
    found = run("sparse_prefill", *given, *chosen, **options)
    check(found, reference.sparse_prefill(*given, *chosen, **options), dtype)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", ["softcap"] if COMPILED == "few" else ["window", "softcap", "sinks"]
)
@pytest.mark.parametrize("selected", [False, True])
def test_each_option_alone(name: str, selected: bool) -> None:
    cache = Cache(SHAPES[0], torch.float32)
    options = {name: {"window": 50, "softcap": 0.5, "sinks": cache.sinks}[name]}
    if selected:
        chosen = cache.selection(144 // PAGE, PAGE, 1)
        compare_selected(cache, chosen, **options)
        wanted = reference.attend(cache.paged, selection=chosen, scale=cache.scale, **options)
        plain = reference.attend(cache.paged, selection=chosen, scale=cache.scale)
    else:
        found = run("attend", cache.paged, scale=cache.scale, **options)
        wanted = reference.attend(cache.paged, scale=cache.scale, **options)
        plain = reference.attend(cache.paged, scale=cache.scale)
        check(found, wanted, torch.float32)
    assert (wanted - plain).abs().max() > 0.01  # the option matters here


@pytest.mark.one_in(2)
@cases(SHAPES[:4:3])
@pytest.mark.parametrize("full", [False, True])
def test_attend_and_score(shape: tuple[int, ...], dtype: torch.dtype, full: bool) -> None:
    cache = Cache(shape, dtype)
    softcap, sinks = (5.0, cache.sinks) if full else (None, None)
    reduces = ("max", "sum", "group_max", "none")
    requests = tuple(ScoreRequest(reduce, unit) for reduce in reduces for unit in (PAGE, 1))
    options = {"requests": requests, "scale": cache.scale, "softcap": softcap, "sinks": sinks}
    found, scores = run("attend_and_score", cache.paged, **options)
    wanted, twins = reference.attend_and_score(cache.paged, **options)
    check(found, wanted, dtype)
    for score, twin in zip(scores, twins, strict=True):
        check(score, twin, torch.float32)


@pytest.mark.one_in(2)
@cases(SHAPES[:2])
def test_head_scores(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cache = Cache(shape, dtype)
    query, keys, _, table, lengths = cache.paged
    found = run("head_scores", query, keys, table, lengths, scale=cache.scale)
    check(found, reference.head_scores(query, keys, table, lengths, scale=cache.scale), found.dtype)
    for row, length in zip(found, LENGTHS, strict=True):
        assert not row[:, length:].any()


def test_a_broken_key_shows_in_the_result() -> None:
    cache = Cache(SHAPES[0], torch.float32)
    cache.keys[cache.table[-1, 3].long(), 1, 5, 7] = torch.nan
    found = run("attend", cache.paged, scale=cache.scale)
    assert found[-1, 3:].isnan().any(-1).all()
    assert not found[-1, :3].isnan().any()
    assert not found[:-1].isnan().any()


def bounded(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> tuple[Cache, Tensor, Tensor]:
    """A cache with one NaN among its keys; its pages, and how many tokens each of them has."""
    cache = Cache(shape, dtype, size=size)
    last = (cache.lengths - 1) // size
    rows = [table[: end + 1] for table, end in zip(cache.table, last.tolist(), strict=True)]
    filled = torch.cat([torch.full_like(row, size) for row in rows])
    ends = torch.tensor([len(row) for row in rows], device=DEVICE).cumsum(0) - 1
    filled[ends] = (cache.lengths - 1) % size + 1
    cache.keys[rows[-1][1].long(), 0, 2, 3] = torch.nan
    return cache, torch.cat(rows).long(), filled.long()


@pytest.mark.one_in(2)
@cases(SHAPES[:3])
@pytest.mark.parametrize("size", [5, 32])
def test_page_bounds(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> None:
    cache, *where = bounded(shape, dtype, size)
    bounds = torch.zeros(4, *cache.keys.shape[:2], shape[2], device=DEVICE).to(dtype)
    run("page_bounds", cache.keys, bounds[0], bounds[1], *where)
    reference.page_bounds(cache.keys, bounds[2], bounds[3], *where)
    torch.testing.assert_close(bounds[:2], bounds[2:], rtol=0, atol=0, equal_nan=True)
    assert bounds[0].isnan().sum() == 1


@pytest.mark.one_in(2)
@cases(SHAPES[:3])
@pytest.mark.parametrize("size", [5, 32])
def test_scores_of_page_bounds(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> None:
    cache, *where = bounded(shape, dtype, size)
    low, high = torch.zeros(2, *cache.keys.shape[:2], shape[2], device=DEVICE).to(dtype)
    reference.page_bounds(cache.keys, low, high, *where)
    operands = cache.query, low, high, cache.table
    found, wanted = run("bound_scores", *operands), reference.bound_scores(*operands)
    assert torch.equal(found.isnan(), wanted.isnan())
    check(found.nan_to_num(0), wanted.nan_to_num(0), torch.float32)


@pytest.mark.parametrize("case", [(None, 700, 4, 16), (None, 1, 0, 0), (50, 60, 1, 2)])
def test_top_k(case: tuple[int | None, int, int, int]) -> None:
    """More than one block of entries; ties, infinities, NaN, nothing to choose and all of it."""
    width, k, first, last = case
    width = width or (9000 if INTERPRETED else 131_072)
    random = torch.Generator().manual_seed(k)
    scores = torch.randn(2, 2, width, generator=random)
    scores[0, 1] = (3 * scores[0, 1]).round()
    scores[1, 0, ::3], scores[1, 0, 1::3], scores[1, 0, 2::6] = torch.nan, torch.inf, -torch.inf
    scores[1, 1] *= 0.0  # of both signs
    for valid in ((width, width // 2 + 1), (0, 3)) if width == 50 else ((width - 7, width),):
        operands = scores.to(DEVICE), torch.tensor(valid, dtype=torch.int32, device=DEVICE), k
        found = run("top_k", *operands, 1, first=first, last=last)
        # On the CPU, where every NaN is sorted as the largest number, whatever its bits are.
        wanted = reference.top_k(scores, operands[1].cpu(), k, 1, first=first, last=last)
        assert found.indices.dtype == found.counts.dtype == torch.int32
        assert torch.equal(found.indices.cpu(), wanted.indices)
        assert torch.equal(found.counts.cpu(), wanted.counts)


def test_a_captured_step_follows_its_operands() -> None:
    """Replayed with other lengths, keys and choices than those it was captured with."""
    cache = Cache(SHAPES[0], torch.float16)
    chosen = cache.selection(144, 1, SHAPES[0][0])
    lengths = cache.lengths.clone()
    low, high = (torch.zeros_like(cache.keys[:, :, 0]) for _ in range(2))
    pages = torch.arange(len(cache.keys), device=DEVICE)
    filled = torch.ones_like(pages)
    row, slot = torch.zeros_like(cache.keys[:1, :, 0]), torch.zeros_like(pages[:1])
    guesses = torch.randn(len(LENGTHS), 2, 300, device=DEVICE)
    place = torch.zeros(len(LENGTHS), 1, dtype=torch.int64, device=DEVICE)
    frequencies = (10000.0 ** -(torch.arange(32) / 32)).double().to(DEVICE)
    below = (cache.keys.cpu(), cache.values.cpu())
    if not INTERPRETED:
        below = (below[0].pin_memory(), below[1].pin_memory())
    rows = torch.arange(len(LENGTHS), device=DEVICE)
    picked = chosen.indices[:, :, :16].clone()
    slots = 16 + PAGE
    above = [
        torch.full((len(LENGTHS), 2, slots), -1, dtype=torch.int32, device=DEVICE),
        *(
            torch.zeros(len(LENGTHS) * slots // PAGE, 2, *pages.shape[2:]).to(cache.keys)
            for pages in below
        ),
    ]

    def step() -> list[Tensor]:
        paged = (*cache.paged[:4], lengths)
        run("append", cache.keys, None, row, None, slot)
        run("page_bounds", cache.keys, low, high, pages, filled)
        requests = (ScoreRequest("max", PAGE),)
        whole, (scores,) = run("attend_and_score", paged, requests=requests, scale=cache.scale)
        bounds = run("bound_scores", cache.query, low, high, cache.table)
        buffered = (*above, *below, cache.table, lengths, rows)
        loaded, _ = run("load_missing", *buffered, selection=Selection(picked, picked, 1))
        return [
            run("attend", paged, scale=cache.scale),
            run("attend", paged, scale=cache.scale, selection=chosen),
            whole,
            scores,
            bounds,
            run("top_k", guesses, lengths.clamp(max=300), 20, 1, first=1, last=2).indices,
            run("head_scores", cache.query, cache.keys, cache.table, lengths, scale=cache.scale),
            run("shift_rope", cache.query, place, frequencies, False),
            loaded.indices,
        ]

    if INTERPRETED:
        found, replay = step(), step
    else:
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        replay = graph.replay
    before = [tensor.clone() for tensor in found]
    lengths.sub_((lengths > 1).int())
    row.normal_()
    slot.copy_(cache.table[-1, 2:3] * PAGE + 1)
    cache.query.normal_()
    guesses.normal_()
    place.fill_(1000)
    picked.copy_(chosen.indices[:, :, 16:32])
    twins = [tensor.clone() for tensor in above]
    replayed = replay() or found
    paged = (*cache.paged[:4], lengths)
    whole, scores = reference.attend_and_score(
        paged, requests=(ScoreRequest("max", PAGE),), scale=cache.scale
    )
    operands = (*twins, *below, cache.table, lengths, rows)
    used, _ = reference.load_missing(*operands, selection=Selection(picked, picked, 1))
    wanted = [
        reference.attend(paged, scale=cache.scale),
        reference.attend(paged, scale=cache.scale, selection=chosen),
        whole,
        *scores,
        reference.bound_scores(cache.query, low, high, cache.table),
        reference.top_k(guesses, lengths.clamp(max=300), 20, 1, first=1, last=2).indices,
        reference.head_scores(cache.query, cache.keys, cache.table, lengths, scale=cache.scale),
        reference.shift_rope(cache.query, place, frequencies, False),
        used.indices,
    ]
    for ours, twin in zip(above, twins, strict=True):
        assert torch.equal(ours, twin)
    assert torch.equal(cache.keys[cache.table[-1, 2].long(), :, 1], row[0])
    for ours, twin, old in zip(replayed, wanted, before, strict=True):
        check(ours, twin, torch.float16 if ours.dtype == torch.float16 else torch.float32)
        assert not torch.equal(ours, old)


#: Of pages of 8 bits: int8, and e4m3 by its bits.
KV_DTYPES = (torch.int8, torch.uint8)


@cases(SHAPES[:3])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pages_of_8_bits_are_attended_to_and_scored(
    shape: tuple[int, ...], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    cache = Cache(shape, dtype)
    cache.quantise(kv_dtype)
    compare_selected(cache, cache.selection(48, 1, 1), softcap=5.0, sinks=cache.sinks)
    requests = (ScoreRequest("max", 1), ScoreRequest("sum", PAGE))
    out, scores = run("attend_and_score", cache.paged, requests=requests, scale=cache.scale)
    wanted, weights = reference.attend_and_score(cache.paged, requests=requests, scale=cache.scale)
    check(out, wanted, dtype)
    for found, exact in zip(scores, weights, strict=True):
        check(found, exact, dtype)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bounds_of_pages_of_8_bits(kv_dtype: torch.dtype) -> None:
    cache = Cache((2, 1, 24, 24), torch.float32)
    cache.quantise(kv_dtype)
    pages = cache.table[-1, :2].long()
    filled = torch.tensor([PAGE, 3], device=DEVICE)
    found, wanted = (
        [torch.zeros(len(cache.keys), 2, 24, device=DEVICE) for _ in range(2)] for _ in range(2)
    )
    run("page_bounds", cache.keys, *found, pages, filled)
    reference.page_bounds(cache.keys, *wanted, pages, filled)
    for one, exact in zip(found, wanted, strict=True):
        check(one, exact, torch.float32)

"""The Triton kernels equal their twins: on a GPU, and under Triton's interpreter without one.

`test_interpreted.py` runs this file with TRITON_INTERPRET=1, on tensors of the CPU; and with
KEYHOLE_COMPILE_ONLY, where a launch only compiles and no result counts (`compile_only.py`).
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from keyhole.kernels import ScoreRequest, Selection, elastic, operations, reference, rotation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = os.environ.get("KEYHOLE_COMPILE_ONLY")  # all, few, or not at all
DEVICE = "cpu" if INTERPRETED or COMPILED else "cuda"
if DEVICE == "cuda":
    pytestmark = pytest.mark.gpu
DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)

PAGE = 16
#: Relative to the largest number: sums in another order; weights and results in the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
#: The values are the first numbers of the keys.
MLA = ((96, 40), (24, 16), (576, 512))
#: KV heads, group, key dim, value dim.
SHAPES = ((2, 3, 64, 32), (1, 1, 16, 16), (2, 4, 80, 80), (1, 20, 96, 40), (1, 66, 24, 16))
LENGTHS = (2 * PAGE, 150) if DEVICE == "cpu" else (1, PAGE - 1, PAGE, 300, 4097, 9000)
#: With the values among the keys, one KV head for all query heads.
LATENTS = ((1, 20, 96, 40), (1, 6, 24, 16))
if not INTERPRETED:
    LATENTS += ((1, 16, 576, 512),)
    SHAPES += ((8, 4, 128, 128), (2, 2, 256, 256), (1, 128, 576, 512))
#: Where no shape tells cases apart: every type in turn, but for a quick look at the compiler.
EACH_DTYPE = DTYPES[2:] if COMPILED == "few" else DTYPES


def cases(shapes: tuple[tuple[int, ...], ...]) -> pytest.MarkDecorator:
    """Shapes with all types in turn, and on a GPU with bfloat16 too.

    On a GPU each is compiled, which takes a second; under the interpreter it takes one to run.
    """
    found = [(shape, DTYPES[i % len(DTYPES)]) for i, shape in enumerate(shapes)]
    if COMPILED == "few":
        found = [(shapes[0], torch.bfloat16)]
    elif not INTERPRETED:
        found += [
            (shape, torch.bfloat16) for shape in shapes if (shape, torch.bfloat16) not in found
        ]
    return pytest.mark.parametrize(("shape", "dtype"), found)


# Interpreted or compiled here they are called by name, as the dispatcher has them on a GPU alone.
gpu = importlib.import_module("keyhole.kernels.gpu") if DEVICE == "cpu" else None


@dataclass
class Cache:
    """Random pages of sequences of different lengths; NaN where no token is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    size: int = PAGE

    def __post_init__(self) -> None:
        heads, group, dim, value_dim = self.shape
        random = torch.Generator().manual_seed(sum(self.shape))
        counts = [-(-length // self.size) for length in LENGTHS]
        order = torch.randperm(sum(counts), generator=random).split(counts)
        table = torch.zeros(len(LENGTHS), max(counts) + 1, dtype=torch.int32)
        keys = torch.randn(sum(counts), heads, self.size, dim, generator=random)
        values = torch.randn(sum(counts), heads, self.size, value_dim, generator=random)
        for row, (pages, length) in enumerate(zip(order, LENGTHS, strict=True)):
            table[row, : len(pages)] = pages
            filled = (length - 1) % self.size + 1
            keys[pages[-1], :, filled:] = values[pages[-1], :, filled:] = torch.nan
        self.keys = keys.to(DEVICE, self.dtype)
        self.values = values.to(DEVICE, self.dtype)
        if (dim, value_dim) in MLA:
            self.values = self.keys[..., :value_dim]
        query = torch.randn(len(LENGTHS), heads * group, dim, generator=random)
        self.query = query.to(DEVICE, self.dtype)
        self.sinks = torch.randn(heads * group, generator=random).to(DEVICE, self.dtype)
        self.table = table.to(DEVICE)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
        self.scale = dim**-0.5
        self.random = random

    @property
    def paged(self) -> tuple[Tensor, ...]:
        return self.query, self.keys, self.values, self.table, self.lengths

    def selection(self, k: int, unit: int, lists: int) -> Selection:
        """The best of random scores, and the newest."""
        entries = self.table.shape[1] * self.size // unit
        scores = torch.randn(len(LENGTHS), lists, entries, generator=self.random).to(DEVICE)
        valid = (self.lengths + unit - 1) // unit
        return reference.top_indices(scores, valid, k, unit, last=1)


def run(name: str, *operands: object) -> object:
    """By the kernel itself where it is interpreted, else by way of the dispatcher."""
    if gpu is not None:
        return gpu.operation(name)(*operands)
    assert operations.backend(torch.device(DEVICE)).startswith("Triton")
    return getattr(torch.ops.keyhole, name)(*operands)


def check(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    if COMPILED:  # what follows is to be compiled, too
        return
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert not found.isnan().any()
    allowed = TOLERANCE[dtype] * wanted.float().abs().max() + 1e-6
    assert (found.float() - wanted.float()).abs().max() <= allowed


def twice(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return tensor, None if tensor is None else tensor.clone()


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [1, 5, PAGE])
def test_append(dtype: torch.dtype, shared: bool, size: int) -> None:
    heads, dim, value_dim = 3, 24, 6
    key = torch.randn(7, heads, dim + 2, device=DEVICE).to(dtype)[..., :dim]
    value = None if shared else torch.randn(7, heads, value_dim, device=DEVICE).to(dtype)
    slots = torch.randperm(9 * size, device=DEVICE)[:7]
    found, wanted = twice(torch.full((9, heads, size, dim), torch.nan, device=DEVICE).to(dtype))
    pages = torch.full((9, heads, size, value_dim), torch.nan, device=DEVICE).to(dtype)
    found_values, wanted_values = twice(None if shared else pages)
    run("append", found, found_values, key, value, slots)
    assert wanted is not None
    reference.append(wanted, wanted_values, key, value, slots)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    if not shared:
        torch.testing.assert_close(found_values, wanted_values, rtol=0, atol=0, equal_nan=True)


@cases(SHAPES)
@pytest.mark.parametrize("window", [None, 20])
def test_attend_to_everything_or_a_window(
    shape: tuple[int, ...], dtype: torch.dtype, window: int | None
) -> None:
    cache = Cache(shape, dtype, size=5 if window is None else PAGE)
    softcap, sinks = (None, None) if window is None else (5.0, cache.sinks)
    found = run("attend", *cache.paged, None, None, 1, cache.scale, window, softcap, sinks)
    options = {"scale": cache.scale, "window": window, "softcap": softcap, "sinks": sinks}
    check(found, reference.attend(*cache.paged, **options), dtype)


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
    lists = (chosen.indices, chosen.counts, chosen.unit)
    found = run("attend", *cache.paged, *lists, cache.scale, window, softcap, sinks)
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    wanted = reference.attend(*cache.paged, selection=chosen, scale=cache.scale, **options)
    check(found, wanted, cache.dtype)


@cases(LATENTS)
@pytest.mark.parametrize("unit", [1, PAGE])
def test_latents_with_a_selection(shape: tuple[int, ...], dtype: torch.dtype, unit: int) -> None:
    cache = Cache(shape, dtype)
    compare_selected(cache, cache.selection(144 // unit, unit, 1))


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
        wanted = reference.attend(*cache.paged, selection=chosen, scale=cache.scale, **options)
        plain = reference.attend(*cache.paged, selection=chosen, scale=cache.scale)
    else:
        operands = (options.get("window"), options.get("softcap"), options.get("sinks"))
        found = run("attend", *cache.paged, None, None, 1, cache.scale, *operands)
        wanted = reference.attend(*cache.paged, scale=cache.scale, **options)
        plain = reference.attend(*cache.paged, scale=cache.scale)
        check(found, wanted, torch.float32)
    assert (wanted - plain).abs().max() > 0.01  # the option matters here


@cases(SHAPES[:4:3])
@pytest.mark.parametrize("full", [False, True])
def test_attend_and_score(shape: tuple[int, ...], dtype: torch.dtype, full: bool) -> None:
    cache = Cache(shape, dtype)
    softcap, sinks = (5.0, cache.sinks) if full else (None, None)
    asked = [(r, unit) for r in ("max", "sum", "group_max", "none") for unit in (PAGE, 1)]
    reduces, units = zip(*asked, strict=True)
    operands = (*cache.paged, list(reduces), list(units), cache.scale, softcap, sinks)
    found, scores = run("attend_and_score", *operands)
    requests = tuple(ScoreRequest(*pair) for pair in asked)
    options = {"requests": requests, "scale": cache.scale, "softcap": softcap, "sinks": sinks}
    wanted, twins = reference.attend_and_score(*cache.paged, **options)
    check(found, wanted, dtype)
    for score, twin in zip(scores, twins, strict=True):
        check(score, twin, torch.float32)


@cases(SHAPES[:2])
def test_head_scores(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cache = Cache(shape, dtype)
    query, keys, _, table, lengths = cache.paged
    found = run("head_scores", query, keys, table, lengths, cache.scale)
    check(found, reference.head_scores(query, keys, table, lengths, scale=cache.scale), found.dtype)
    for row, length in zip(found, LENGTHS, strict=True):
        assert not row[:, length:].any()


def test_a_broken_key_shows_in_the_result() -> None:
    cache = Cache(SHAPES[0], torch.float32)
    cache.keys[cache.table[-1, 3].long(), 1, 5, 7] = torch.nan
    found = run("attend", *cache.paged, None, None, 1, cache.scale, None, None, None)
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


@cases(SHAPES[:3])
@pytest.mark.parametrize("size", [5, 32])
def test_page_bounds(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> None:
    cache, *where = bounded(shape, dtype, size)
    bounds = torch.zeros(4, *cache.keys.shape[:2], shape[2], device=DEVICE).to(dtype)
    run("page_bounds", cache.keys, bounds[0], bounds[1], *where)
    reference.page_bounds(cache.keys, bounds[2], bounds[3], *where)
    torch.testing.assert_close(bounds[:2], bounds[2:], rtol=0, atol=0, equal_nan=True)
    assert bounds[0].isnan().sum() == 1


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
def test_top_indices(case: tuple[int | None, int, int, int]) -> None:
    """More than one block of entries; ties, infinities, NaN, nothing to choose and all of it."""
    width, k, first, last = case
    width = width or (5000 if INTERPRETED else 131_072)
    random = torch.Generator().manual_seed(k)
    scores = torch.randn(2, 2, width, generator=random)
    scores[0, 1] = (3 * scores[0, 1]).round()
    scores[1, 0, ::3], scores[1, 0, 1::3], scores[1, 0, 2::6] = torch.nan, torch.inf, -torch.inf
    scores[1, 1] *= 0.0  # of both signs
    for valid in ((width, width // 2 + 1), (0, 3)) if width == 50 else ((width - 7, width),):
        operands = scores.to(DEVICE), torch.tensor(valid, dtype=torch.int32, device=DEVICE), k
        indices, counts = run("top_indices", *operands, first, last)
        # On the CPU, where every NaN is sorted as the largest number, whatever its bits are.
        wanted = reference.top_indices(scores, operands[1].cpu(), k, 1, first=first, last=last)
        assert indices.dtype == counts.dtype == torch.int32
        assert torch.equal(indices.cpu(), wanted.indices)
        assert torch.equal(counts.cpu(), wanted.counts)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("pairs", [12, 20])
@pytest.mark.parametrize("last", [False, True])
def test_rotate(dtype: torch.dtype, pairs: int, last: bool) -> None:
    """All of a vector or a part; one place per token, per vector, for all, and for one vector."""
    random = torch.Generator().manual_seed(pairs)
    x = torch.randn(3, 19, 2 * 20, generator=random).to(DEVICE, dtype)
    by = torch.randint(-100_000, 1_000_000, (19, 3), generator=random).to(DEVICE)
    frequencies = (10000.0 ** -(torch.arange(pairs) / pairs)).double().to(DEVICE)
    tokens = x.transpose(0, 1)  # [T, H, D]
    one = by[0, 0]
    for rows, place in (
        (tokens, by[:, :1]),
        (tokens, by),
        (x, one),
        (x[0, 0], one),
        (x[:, :0], one),
    ):
        found = run("rotate", rows, place, frequencies, last)
        wanted = rotation.rotate(rows, place, frequencies, last)
        assert found.dtype == wanted.dtype
        rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(found, wanted, rtol=rounding, atol=2e-6)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("dim", [20, 64])
@pytest.mark.parametrize("batch", [1, 3])
def test_rotary(dtype: torch.dtype, dim: int, batch: int) -> None:
    """Heads as a model has them, a view of tokens' rows; angles of each text, or of all."""
    random = torch.Generator().manual_seed(dim)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(DEVICE, dtype)

    query, key = (draw(batch, 7, heads, dim).transpose(1, 2) for heads in (6, 2))
    for texts in {1, batch}:
        cos, sin = draw(2, texts, 7, dim)
        found = run("rotary", query, key, cos, sin)
        wanted = reference.rotary(query, key, cos, sin)
        rounding = torch.finfo(dtype).eps  # the interpreter cuts bfloat16 off; products reach 16
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == dtype
            assert ours.transpose(1, 2).is_contiguous()
            torch.testing.assert_close(ours, theirs, rtol=rounding, atol=16 * rounding)
    none = run("rotary", query[:, :, :0], key[:, :, :0], cos[:, :0], sin[:, :0])
    assert [x.shape[2] for x in none] == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else EACH_DTYPE)
@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_exchange(dtype: torch.dtype, unit: int, shared: bool) -> None:
    heads, size, dim, value_dim, places, most = 2, 4, 24, 8, 12 // unit, 40
    random = torch.Generator().manual_seed(unit)
    table = torch.randperm(30, generator=random).view(3, 10).int().to(DEVICE)
    key_pages = torch.randn(30, heads, size, dim, generator=random).to(dtype)
    value_pages = torch.randn(30, heads, size, value_dim, generator=random).to(dtype)
    if not INTERPRETED:
        key_pages, value_pages = key_pages.pin_memory(), value_pages.pin_memory()
    slots = places + (size if unit == 1 else 1)
    rows = torch.tensor([2, 0], device=DEVICE)
    buffer = torch.full((3 * slots * unit // size, heads, size, dim), torch.nan, device=DEVICE)
    found, wanted = (
        [
            torch.full((3, heads, slots), -1, dtype=torch.int32, device=DEVICE),
            buffer.to(dtype, copy=True),
            None if shared else buffer[..., :value_dim].to(dtype).contiguous(),
        ]
        for _ in range(2)
    )
    for step in range(3):
        lengths = torch.tensor([20 + step, most - step], dtype=torch.int32)
        picked = torch.randint(-1, 20 // unit, (2, heads, places), generator=random).int()
        picked[..., 0] = (lengths - 1)[:, None] // unit
        paged = (key_pages, None if shared else value_pages, table[:2])
        here = (lengths.to(DEVICE), rows, picked.to(DEVICE))
        results = run("exchange", *found, *paged, *here, unit)
        selection = Selection(here[2], here[2], unit)
        used, moved = elastic.exchange(*wanted, *paged, *here[:2], selection=selection)
        for ours, twin in zip(results, (used.indices, used.counts, moved), strict=True):
            assert ours.dtype == twin.dtype
            assert torch.equal(ours, twin)
        for ours, twin in zip(found, wanted, strict=True):
            if ours is not None:
                torch.testing.assert_close(ours, twin, rtol=0, atol=0, equal_nan=True)


def test_a_captured_step_follows_its_operands() -> None:
    """Replayed with other lengths, keys and choices than those it was captured with."""
    cache = Cache(SHAPES[0], torch.float16)
    chosen = cache.selection(144, 1, SHAPES[0][0])
    lengths = cache.lengths.clone()
    low, high = (torch.zeros_like(cache.keys[:, :, 0]) for _ in range(2))
    pages = torch.arange(len(cache.keys), device=DEVICE)
    filled = torch.ones_like(pages)
    row, slot = torch.zeros_like(cache.keys[:1, :, 0]), torch.zeros_like(pages[:1])
    options = (cache.scale, None, None, None)
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
        whole, (scores,) = run("attend_and_score", *paged, ["max"], [PAGE], cache.scale, None, None)
        bounds = run("bound_scores", cache.query, low, high, cache.table)
        return [
            run("attend", *paged, None, None, 1, *options),
            run("attend", *paged, chosen.indices, chosen.counts, 1, *options),
            whole,
            scores,
            bounds,
            run("top_indices", guesses, lengths.clamp(max=300), 20, 1, 2)[0],
            run("head_scores", cache.query, cache.keys, cache.table, lengths, cache.scale),
            run("rotate", cache.query, place, frequencies, False),
            run("exchange", *above, *below, cache.table, lengths, rows, picked, 1)[0],
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
        *paged, requests=(ScoreRequest("max", PAGE),), scale=cache.scale
    )
    operands = (*twins, *below, cache.table, lengths, rows)
    used, _ = elastic.exchange(*operands, selection=Selection(picked, picked, 1))
    wanted = [
        reference.attend(*paged, scale=cache.scale),
        reference.attend(*paged, scale=cache.scale, selection=chosen),
        whole,
        *scores,
        reference.bound_scores(cache.query, low, high, cache.table),
        reference.top_indices(guesses, lengths.clamp(max=300), 20, 1, first=1, last=2).indices,
        reference.head_scores(cache.query, cache.keys, cache.table, lengths, scale=cache.scale),
        rotation.rotate(cache.query, place, frequencies, False),
        used.indices,
    ]
    for ours, twin in zip(above, twins, strict=True):
        assert torch.equal(ours, twin)
    assert torch.equal(cache.keys[cache.table[-1, 2].long(), :, 1], row[0])
    for ours, twin, old in zip(replayed, wanted, before, strict=True):
        check(ours, twin, torch.float16 if ours.dtype == torch.float16 else torch.float32)
        assert not torch.equal(ours, old)

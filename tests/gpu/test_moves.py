"""The Triton kernels that move and rotate, equal to their twins."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from keyhole.kernels import Selection, reference
from tests.gpu.operands import DEVICE, DTYPES, EACH_DTYPE, INTERPRETED, MARKS, PAGE, run, twice

pytestmark = MARKS


@pytest.mark.one_in(3)
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


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8])
def test_append_to_pages_of_8_bits(kv_dtype: torch.dtype) -> None:
    """Floats are quantised, and rows that are quantised already are copied."""
    key, value = torch.randn(7, 3, 24, device=DEVICE), torch.randn(7, 3, 8, device=DEVICE)
    slots = torch.randperm(9 * PAGE, device=DEVICE)[:7]
    wanted = [torch.zeros(9, 3, PAGE, dim + 4, dtype=kv_dtype, device=DEVICE) for dim in (24, 8)]
    reference.append(*wanted, key, value, slots)
    rows = [reference.quantise(x, kv_dtype) for x in (key, value)]
    for new in ((key, value), rows):
        found = [torch.zeros_like(x) for x in wanted]
        run("append", *found, *new, slots)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.one_in(3)
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
        found = run("shift_rope", rows, place, frequencies, last)
        wanted = reference.shift_rope(rows, place, frequencies, last)
        assert found.dtype == wanted.dtype
        rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(found, wanted, rtol=rounding, atol=2e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("dim", [20, 64])
@pytest.mark.parametrize("batch", [1, 3])
def test_apply_rope(dtype: torch.dtype, dim: int, batch: int) -> None:
    """Heads as a model has them, a view of tokens' rows; angles of each text, or of all."""
    random = torch.Generator().manual_seed(dim)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(DEVICE, dtype)

    query, key = (draw(batch, 7, heads, dim).transpose(1, 2) for heads in (6, 2))
    for texts in {1, batch}:
        cos, sin = draw(2, texts, 7, dim)
        found = run("apply_rope", query, key, cos, sin)
        wanted = reference.apply_rope(query, key, cos, sin)
        rounding = torch.finfo(dtype).eps  # the interpreter cuts bfloat16 off; products reach 16
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == dtype
            assert ours.transpose(1, 2).is_contiguous()
            torch.testing.assert_close(ours, theirs, rtol=rounding, atol=16 * rounding)
    none = run("apply_rope", query[:, :, :0], key[:, :, :0], cos[:, :0], sin[:, :0])
    assert [x.shape[2] for x in none] == [0, 0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else EACH_DTYPE)
@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_exchange(dtype: torch.dtype, unit: int, shared: bool) -> None:
    heads, size, dim, value_dim, places, most = 2, 4, 24, 8, 12 // unit, 40
    random = torch.Generator().manual_seed(unit)
    table = torch.randperm(30, generator=random).view(3, 10).int().to(DEVICE)
    key_pages = torch.randn(30, heads, size, dim, generator=random).to(dtype)
    value_pages = torch.randn(30, heads, size, value_dim, generator=random).to(dtype)
    if torch.cuda.is_available():
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
        here = (lengths.to(DEVICE), rows)
        selection = Selection(picked.to(DEVICE), picked.to(DEVICE), unit)
        results = [
            load(*buffers, *paged, *here, selection=selection)
            for load, buffers in (
                (partial(run, "load_missing"), found),
                (reference.load_missing, wanted),
            )
        ]
        ours_and_twins = ((used.indices, used.counts, moved) for used, moved in results)
        for ours, twin in zip(*ours_and_twins, strict=True):
            assert ours.dtype == twin.dtype
            assert torch.equal(ours, twin)
        for ours, twin in zip(found, wanted, strict=True):
            if ours is not None:
                torch.testing.assert_close(ours, twin, rtol=0, atol=0, equal_nan=True)

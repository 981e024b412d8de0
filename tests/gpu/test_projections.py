"""The Triton kernels of a decoder layer's products, and RoPE into pages, equal to float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keyhole.kernels import reference
from keyhole.kernels.triton import overlap
from tests import oracle
from tests.gpu.operands import (
    COMPILED,
    DEVICE,
    DTYPES,
    EACH_DTYPE,
    INTERPRETED,
    MARKS,
    PAGE,
    TOLERANCE,
    Cache,
    cases,
    run,
)
from tests.oracle import Array, float64

pytestmark = MARKS


@pytest.fixture(params=[False] if INTERPRETED else [False, True], autouse=True)
def _overlapped(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every kernel is also compiled, or run, so that it starts while the one before it ends."""
    if request.param and not COMPILED and not overlap.is_possible():
        pytest.skip("needs compute capability 9.0")
    with overlap.using(request.param):
        yield


#: Tokens, width, rows of each weight: one and several columns at a time, and what fits into none.
SIZES = ((1, 256, (17, 5, 6)), (2, 300, (1, 9)), (3, 24, (8,)), (4, 1024, (4, 4, 3)))
#: The most tokens of a kernel, and a case of one more.
MOST_TOKENS = 4
MANY = ((5, 40, (6, 2)),)
EPSILON = 1e-5


class Operands:
    """Random numbers of a dtype, and what they are in float64."""

    def __init__(self, tokens: int, width: int, dtype: torch.dtype) -> None:
        self.random = torch.Generator().manual_seed(tokens * width)
        self.dtype = dtype
        # A part of wider rows.
        self.x = self.draw(tokens, width + 8, scale=3.0)[:, :width]
        self.norm = self.draw(width), EPSILON

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=self.random)).to(DEVICE, self.dtype)

    def weight(self, rows: int) -> Tensor:
        width = self.x.shape[1]
        return self.draw(rows, width, scale=width**-0.5)

    @property
    def normed(self) -> Array:
        return oracle.rms_normed(exact(self.x), exact(self.norm[0]), EPSILON)


def exact(x: Tensor) -> Array:
    return float64(x.cpu())


def compare(found: Tensor, wanted: Array, dtype: torch.dtype, roundings: int = 2) -> None:
    """roundings: to the dtype; the interpreter cuts bfloat16 off."""
    if COMPILED:
        return
    assert found.dtype == dtype
    assert tuple(found.shape) == wanted.shape
    rounding = max(torch.finfo(dtype).eps, 1e-6) * roundings
    difference = np.abs(exact(found) - wanted)
    assert difference.max() <= rounding * np.abs(wanted).max()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("size", SIZES + MANY)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_layers_after_a_norm(
    size: tuple[int, int, tuple[int, ...]], dtype: torch.dtype, biased: bool
) -> None:
    tokens, width, rows = size
    given = Operands(tokens, width, dtype)
    weights = tuple(given.weight(n) for n in rows)
    biases = tuple(given.draw(n) if biased else None for n in rows)
    found = run("norm_linears", given.x, given.norm, weights, biases)
    if COMPILED:
        return
    for out, weight, bias in zip(found, weights, biases, strict=True):
        wanted = given.normed @ exact(weight).T
        compare(out, wanted + (0 if bias is None else exact(bias)), dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("size", SIZES + MANY)
def test_swiglu_after_a_norm(size: tuple[int, int, tuple[int, ...]], dtype: torch.dtype) -> None:
    tokens, width, (rows, *_) = size
    given = Operands(tokens, width, dtype)
    gate, up = given.weight(rows), given.weight(rows)
    found = run("norm_swiglu", given.x, given.norm, gate, up)
    products = (given.normed @ exact(weight).T for weight in (gate, up))
    compare(found, oracle.swiglu(*products), dtype, roundings=6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("size", SIZES + MANY)
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer_and_the_residual(
    size: tuple[int, int, tuple[int, ...]], dtype: torch.dtype, biased: bool
) -> None:
    tokens, width, (rows, *_) = size
    given = Operands(tokens, width, dtype)
    weight, residual = given.weight(rows), given.draw(tokens, rows + 3, scale=2.0)[:, :rows]
    bias = given.draw(rows) if biased else None
    found = run("linear_add", given.x, weight, bias, residual)
    wanted = exact(given.x) @ exact(weight).T + exact(residual)
    compare(found, wanted + (0 if bias is None else exact(bias)), dtype, roundings=3)


def test_a_bias_for_some_of_the_layers_and_weights_that_are_no_rows() -> None:
    """What no kernel computes, the reference does."""
    given = Operands(2, 16, torch.float32)
    weights, biases = (given.weight(4), given.weight(3)), (None, given.draw(3))
    found = run("norm_linears", given.x, given.norm, weights, biases)
    compare(found[1], given.normed @ exact(weights[1]).T + exact(biases[1]), torch.float32)
    turned = given.weight(16).T
    found = run("linear_add", given.x, turned, None, given.x)
    compare(found, exact(given.x) @ exact(turned).T + exact(given.x), torch.float32)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("heads", [(6, 2, 20), (1, 1, 64), (7, 1, 80)])
@pytest.mark.parametrize("size", [1, 5, PAGE])
def test_rope_into_pages(dtype: torch.dtype, heads: tuple[int, int, int], size: int) -> None:
    """Queries and keys as rows of one tensor; every other place of the pages stays as it was."""
    num_heads, num_kv_heads, dim = heads
    given, tokens = Operands(3, 16, dtype), 3
    counts = (num_heads, num_kv_heads, num_kv_heads)
    rows = given.draw(tokens, sum(counts), dim)
    query, key, value = rows.split(counts, 1)
    cos, sin = given.draw(2, tokens, dim)
    slots = torch.randperm(9 * size, generator=given.random)[:tokens].to(DEVICE)
    pages = [given.draw(9, num_kv_heads, size, dim + 2)[..., :dim] for _ in range(2)]
    wanted_pages = [exact(x) for x in pages]
    found = run("apply_rope_and_append", *pages, query, key, value, cos, sin, slots)
    if COMPILED:
        return
    wanted = [oracle.rotated(exact(x), exact(cos), exact(sin)) for x in (query, key)]
    for ours, exactly in zip(found, wanted, strict=True):
        compare(ours, exactly, dtype, roundings=4)
    for token, slot in enumerate(slots.tolist()):
        place = slot // size, slice(None), slot % size
        assert torch.equal(pages[0][place], found[1][token])
        assert torch.equal(pages[1][place], value[token])
        for exactly, own in zip(wanted_pages, pages, strict=True):
            exactly[place] = exact(own[place])
    for ours, exactly in zip(pages, wanted_pages, strict=True):
        assert (exact(ours) == exactly).all()


def test_rope_into_pages_of_8_bits_and_values_of_another_size() -> None:
    given = Operands(2, 16, DTYPES[0])
    query, key, value = given.draw(2, 4, 16), given.draw(2, 2, 16), given.draw(2, 2, 8)
    cos, sin = given.draw(2, 2, 16)
    slots = torch.tensor([3, 17], device=DEVICE)
    for pages in (
        [torch.zeros(2, 2, PAGE, dim + 4, dtype=torch.int8, device=DEVICE) for dim in (16, 8)],
        [torch.zeros(2, 2, PAGE, dim, device=DEVICE) for dim in (16, 8)],
    ):
        wanted_pages = [x.clone() for x in pages]
        new = query, key, value, cos, sin, slots
        found = run("apply_rope_and_append", *pages, *new)
        wanted = reference.apply_rope_and_append(*wanted_pages, *new)
        if COMPILED:
            continue
        for ours, twin in zip((*found, *pages), (*wanted, *wanted_pages), strict=True):
            torch.testing.assert_close(ours, twin, rtol=1e-6, atol=1e-6)


@cases(((1, 2, 16, 16),))
def test_attention_between_them(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Products, RoPE and attention of a layer, again and again, each as soon as it may start."""
    cache, (heads, group, dim, _) = Cache(shape, dtype), shape
    lengths, table = cache.lengths[:MOST_TOKENS], cache.table[:MOST_TOKENS]
    count, width = len(lengths), heads * group * dim
    given = Operands(count, width, dtype)
    weight, (cos, sin) = given.weight(width), given.draw(2, count, dim)
    last = lengths.long() - 1
    slots = table.gather(1, (last // PAGE)[:, None])[:, 0].long() * PAGE + last % PAGE
    key, value = (given.draw(count, heads, dim) for _ in range(2))

    def steps(call: Callable[..., Any]) -> Tensor:
        x = given.x
        for _ in range(2):
            (query,) = call("norm_linears", x, given.norm, (weight,), (None,))
            new = query.unflatten(1, (-1, dim)), key, value, cos, sin, slots
            query, _ = call("apply_rope_and_append", cache.keys, cache.values, *new)
            paged = (query, cache.keys, cache.values, table, lengths)
            out = call("attend", paged, scale=cache.scale).flatten(1)
            x = call("linear_add", out, weight, None, x)
        return x

    found = steps(run)
    if COMPILED:
        return
    wanted = steps(lambda name, *rest, **more: getattr(reference, name)(*rest, **more))
    difference = (found - wanted).float().abs().max()
    assert difference <= 8 * TOLERANCE[dtype] * wanted.float().abs().max()

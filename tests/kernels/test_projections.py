"""The products of a decoder layer, and RoPE into pages, equal to their formulas in float64."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.kernels.reference.layers import Weight
from tests import oracle
from tests.effort import examples
from tests.kernels.paged import DTYPES
from tests.oracle import Array, float64

#: Roundings of intermediate results, relative to the largest number.
ROUNDINGS = 8


def close(found: torch.Tensor, wanted: Array) -> None:
    assert tuple(found.shape) == wanted.shape
    rounding = ROUNDINGS * max(torch.finfo(found.dtype).eps, 1e-7)
    largest = np.abs(wanted).max(initial=1.0)
    assert np.abs(float64(found) - wanted).max(initial=0.0) <= rounding * largest


@given(
    tokens=st.integers(1, 9),
    width=st.integers(1, 70),
    rows=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    biased=st.booleans(),
    epsilon=st.sampled_from((1e-6, 0.1)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@examples(100)
def test_products_of_a_layer(
    tokens: int,
    width: int,
    rows: list[int],
    biased: bool,
    epsilon: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    x, norm = draw(tokens, width), draw(width)
    weights = tuple(draw(n, width) / width**0.5 for n in rows)
    biases = tuple(draw(n) if biased else None for n in rows)
    normed = oracle.rms_normed(float64(x), float64(norm), epsilon)
    close(kernels.rms_norm(x[:, None], norm, epsilon), normed[:, None])
    exact = [normed @ float64(weight).T for weight in weights]
    added = [0.0 if bias is None else float64(bias) for bias in biases]
    found = kernels.norm_linears(x, (norm, epsilon), weights, biases)
    for out, product, bias in zip(found, exact, added, strict=True):
        close(out, product + bias)

    other = draw(rows[0], width) / width**0.5
    wanted = oracle.swiglu(exact[0], normed @ float64(other).T)
    close(kernels.norm_swiglu(x, (norm, epsilon), weights[0], other), wanted)

    residual = draw(tokens, rows[0])
    wanted = float64(residual) + float64(x) @ float64(weights[0]).T + added[0]
    close(kernels.linear_add(x, weights[0], biases[0], residual), wanted)


@given(
    tokens=st.sampled_from((1, 3, 8, 300)),
    kinds=st.lists(
        st.sampled_from(("plain", "4:32", "4:64", "6:32", "8:32", "blocks")), min_size=1, max_size=7
    ),
    biased=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@examples(40)
def test_packed_weights_beside_plain_ones(
    tokens: int, kinds: list[str], biased: bool, dtype: torch.dtype, seed: int
) -> None:
    """Bit by bit the products of one weight after another, which have tests of their own."""
    random = torch.Generator().manual_seed(seed)
    width = 128

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    def weight(kind: str, rows: int) -> Weight:
        if kind == "plain":
            return draw(rows, width) / width**0.5
        if kind == "blocks":
            codes = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8, generator=random)
            halves = (torch.randn(rows, width // 32, 1, generator=random) / 64).half()
            none = torch.empty(rows, 0, 0, dtype=torch.int8)
            return kernels.BlockWeight(codes, halves.view(torch.uint8), none, 4)
        bits, group = map(int, kind.split(":"))
        return kernels.pack(draw(rows, width), bits, group)

    def product(x: torch.Tensor, by: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(by, torch.Tensor):
            return kernels.linear(x, by, bias)
        return kernels.packed_linear(x, by, bias)

    x, norm = draw(tokens, 2 * width)[:, :width], draw(width)
    weights = tuple(weight(kind, 3 + 17 * i) for i, kind in enumerate(kinds))
    biases = tuple(draw(3 + 17 * i) if biased else None for i in range(len(kinds)))
    normed = kernels.rms_norm(x, norm, 1e-6)
    found = kernels.norm_linears(x, (norm, 1e-6), weights, biases)
    for out, by, bias in zip(found, weights, biases, strict=True):
        assert torch.equal(out, product(normed, by, bias))

    gate, up = weight(kinds[0], 20), weight(kinds[-1], 20)
    swiglu = oracle.swiglu(float64(product(normed, gate)), float64(product(normed, up)))
    close(kernels.norm_swiglu(x, (norm, 1e-6), gate, up), swiglu)
    residual = draw(tokens, 3)
    wanted = residual + product(x, weights[0], biases[0])
    assert torch.equal(kernels.linear_add(x, weights[0], biases[0], residual), wanted)


@given(
    heads=st.sampled_from(((4, 2), (3, 1), (7, 7))),
    dim=st.sampled_from((2, 8, 20)),
    size=st.sampled_from((1, 4, 16)),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
@examples(60)
def test_rope_into_pages(
    heads: tuple[int, int], dim: int, size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    pages, (num_heads, num_kv_heads) = 5, heads
    slots = data.draw(st.lists(st.integers(0, pages * size - 1), unique=True, max_size=6))
    random = torch.Generator().manual_seed(len(slots))
    counts = (num_heads, num_kv_heads, num_kv_heads)
    drawn = torch.randn(len(slots), sum(counts), dim, generator=random).to(dtype)
    query, key, value = drawn.split(counts, 1)
    cos, sin = torch.randn(2, len(slots), dim // 2, generator=random).repeat(1, 1, 2).to(dtype)
    stored = [
        torch.full((pages, num_kv_heads, size, dim), torch.nan, dtype=dtype) for _ in range(2)
    ]
    places = torch.tensor(slots).long()
    found = kernels.apply_rope_and_append(*stored, query, key, value, cos, sin, places)
    for ours, given_heads in zip(found, (query, key), strict=True):
        if slots:
            close(ours, oracle.rotated(float64(given_heads), float64(cos), float64(sin)))
    for token, slot in enumerate(slots):
        place = slot // size, slice(None), slot % size
        assert torch.equal(stored[0][place], found[1][token])
        assert torch.equal(stored[1][place], value[token])
    written = ~stored[0].isnan().all(-1)
    assert int(written.sum()) == num_kv_heads * len(slots)


@given(
    sizes=st.tuples(*(st.integers(1, 3) for _ in range(3)), st.integers(0, 5)),
    half=st.sampled_from((1, 4, 12, 35)),
    shared=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@examples(60)
def test_rope(
    sizes: tuple[int, int, int, int], half: int, shared: bool, dtype: torch.dtype, seed: int
) -> None:
    """Of heads as a linear layer leaves them: those of a token lie next to each other."""
    num_sequences, num_heads, num_kv_heads, num_tokens = sizes
    random = torch.Generator().manual_seed(seed)
    packed = torch.randn(
        num_sequences, num_tokens, num_heads + num_kv_heads, 2 * half + 3, generator=random
    )
    # The numbers of a head that are not rotated lie between.
    query, key = (
        part[..., : 2 * half].transpose(1, 2)
        for part in packed.to(dtype).split((num_heads, num_kv_heads), 2)
    )
    angles = torch.randn(2, 1 if shared else num_sequences, num_tokens, half, generator=random)
    cos, sin = angles.repeat(1, 1, 1, 2).to(dtype)
    found = kernels.apply_rope(query, key, cos, sin)
    for out, x in zip(found, (query, key), strict=True):
        assert out.shape == x.shape
        for i in range(num_sequences if num_tokens else 0):
            tokens = out[i].transpose(0, 1), x[i].transpose(0, 1)
            place = 0 if shared else i
            close(
                tokens[0],
                oracle.rotated(float64(tokens[1]), float64(cos[place]), float64(sin[place])),
            )

"""Weights packed in 4, 6 and 8 bits: what is stored, and products with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.kernels import cpu, reference
from tests.effort import examples
from tests.kernels.test_twins import DTYPES, TOLERANCE, check

#: Bits, and weights that share a scale.
FORMATS = st.sampled_from(
    [(bits, group) for bits in (4, 6, 8) for group in (32, 64, 128)] + [(6, 16)]
)


@given(
    st.integers(1, 36),
    st.sampled_from((1, 15, 16, 17, 100)),
    st.sampled_from((1, 2, 5, 17)),
    FORMATS,
    DTYPES,
    st.booleans(),
)
@examples(60)
def test_products_are_those_of_the_unpacked_weight(
    tokens: int,
    outputs: int,
    blocks: int,
    packing: tuple[int, int],
    dtype: torch.dtype,
    with_bias: bool,
) -> None:
    bits, group = packing
    inputs = blocks * max(64, group)
    random = torch.Generator().manual_seed(tokens * outputs + inputs + group + bits)
    x, weight, bias = (
        torch.randn(shape, generator=random).to(dtype)
        for shape in ((2, tokens, inputs), (outputs, inputs), (outputs,))
    )
    packed = kernels.pack(weight, bits, group)
    exact = unpacked(packed)
    check(kernels.unpack(packed), exact.to(dtype), dtype)
    found = kernels.packed_linear(x, packed, bias if with_bias else None)
    wanted = x.double() @ exact.T + (bias.double() if with_bias else 0.0)
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    # Plain paths round the weights to the dtype first, so it counts what is added up.
    size = x.double().abs() @ exact.abs().T + 1.0
    assert ((found.double() - wanted).abs() <= TOLERANCE[dtype] * size).all()


@given(
    st.integers(1, 36),
    st.sampled_from((1, 15, 16, 17, 100)),
    st.integers(1, 5),
    st.sampled_from([(4, 1, False), (8, 1, False), (4, 8, True), (6, 8, True), (6, 16, False)]),
    DTYPES,
    st.booleans(),
)
@examples(60)
def test_products_are_those_of_the_numbers_of_blocks(
    tokens: int,
    outputs: int,
    blocks: int,
    kind: tuple[int, int, bool],
    dtype: torch.dtype,
    with_bias: bool,
) -> None:
    """kind: bits, groups of a block, whether they have minimums."""
    bits, groups, minimums = kind
    blocks *= 2 if groups == 1 else 1  # of 32 weights; otherwise of 256
    inputs = blocks * (32 if groups == 1 else 256)
    random = torch.Generator().manual_seed(tokens * outputs + inputs + groups + bits)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)

    halves = (torch.randn(outputs, blocks, 1 + minimums, generator=random) / 256).half()
    shape = (outputs, 0, 0) if groups == 1 else (outputs, 1 + minimums, blocks * groups)
    of_groups = drawn(*shape) if minimums else drawn(*shape).view(torch.int8)
    codes = drawn(outputs, inputs * bits // 8)
    weight = kernels.BlockWeight(codes, halves.view(torch.uint8), of_groups, bits)
    ones = torch.ones(outputs, 1)
    whole = unpacked(kernels.PackedWeight(codes, ones, ones * 0, bits))
    exact = torch.empty_like(whole)
    size = inputs // (blocks * groups)
    for g in range(blocks * groups):
        half, own = halves[:, g // groups].double(), of_groups[:, :, g : g + 1].double()
        part = slice(g * size, (g + 1) * size)
        if minimums:
            exact[:, part] = half[:, :1] * own[:, 0] * whole[:, part] - half[:, 1:] * own[:, 1]
        else:
            scale = half * own[:, 0] if groups > 1 else half
            exact[:, part] = scale * (whole[:, part] - 2 ** (bits - 1))
    x = torch.randn(tokens, inputs, generator=random).to(dtype)
    bias = torch.randn(outputs, generator=random).to(dtype)
    found = kernels.packed_linear(x, weight, bias if with_bias else None)
    wanted = x.double() @ exact.T + (bias.double() if with_bias else 0.0)
    assert found.dtype == dtype
    # The minimums of groups, and the numbers without them, are added up one after another.
    largest = exact.abs().amax(1)
    size_of = x.double().abs() @ (exact.abs() + largest[:, None]).T
    rounded = torch.finfo(dtype).eps * (wanted.abs() + 1e-3)
    lost = 2.0**-15 if dtype != torch.float32 else 2e-6
    assert ((found.double() - wanted).abs() <= lost * size_of + rounded).all()


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_input_costs_the_precision_of_its_own_group_only(
    bits: int, group: int, dtype: torch.dtype
) -> None:
    """A processor may round inputs of 16 bits to 2^-16 of the largest one of their group."""
    random = torch.Generator().manual_seed(group + bits)
    weight = torch.randn(48, 512, generator=random).to(dtype)
    x = torch.randn(5, 512, generator=random)
    x[:, 300] = 3e4
    weight[:, 256:384] = 0.0  # so that the large input itself adds nothing
    x[3] *= 1e-4
    x[4] = 0.0
    x, packed = x.to(dtype), kernels.pack(weight, bits, group)
    found = kernels.packed_linear(x, packed)
    plain = cpu.current() == cpu.REFERENCE  # which rounds weights to the dtype
    exact = kernels.unpack(packed).double() if plain else unpacked(packed)
    wanted = x.double() @ exact.T
    largest = x.double().unflatten(1, (-1, group)).abs().amax(2)
    codes = (exact - packed.minimums.double().repeat_interleave(group, 1)).abs()
    lost = 2.0**-16 * largest @ codes.unflatten(1, (-1, group)).sum(2).T
    rounded = torch.finfo(dtype).eps * wanted.abs() + 1e-6
    assert ((found.double() - wanted).abs() <= lost + rounded).all()


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_tiny_inputs_count_in_full_or_not_at_all(bits: int) -> None:
    """Their codes were dropped, and not their minimums: results were wrong by their own size."""
    random = torch.Generator().manual_seed(bits)
    packed = kernels.pack(torch.randn(20, 128, generator=random).bfloat16(), bits, 64)
    x = (torch.randn(2, 128, generator=random) * 1e-33).bfloat16()
    found = kernels.packed_linear(x, packed)
    wanted = x.double() @ unpacked(packed).T
    error = (found.double() - wanted).abs() / (x.double().abs() @ unpacked(packed).abs().T)
    assert not found.any() or (error <= 0.01).all()


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_an_input_that_is_not_finite_is_not_hidden(bits: int, number: float) -> None:
    packed = kernels.pack(torch.randn(20, 256).bfloat16(), bits, 64)
    x = torch.randn(3, 256).bfloat16()
    wanted = kernels.packed_linear(x, packed)
    x[1, 77] = number
    found = kernels.packed_linear(x, packed)
    assert not found[1].isfinite().any()
    torch.testing.assert_close(found[::2], wanted[::2], rtol=0, atol=0)


def unpacked(packed: kernels.PackedWeight) -> torch.Tensor:
    """In float64, weight by weight, as the format is described."""
    codes, scales, minimums, bits = packed
    rows = []
    for row, scale, minimum in zip(codes.tolist(), scales.tolist(), minimums.tolist(), strict=True):
        whole = row
        if bits < 8:
            whole = []
            for first in range(0, len(row), 8 * bits):
                block = row[first : first + 8 * bits]
                low, high = block[:32], block[32:]
                lower = [byte % 16 for byte in low] + [byte // 16 for byte in low]
                upper = [byte // 4**q % 4 for q in range(4) for byte in high] or [0] * 64
                whole += [a + 16 * b for a, b in zip(lower, upper, strict=True)]
        size = len(whole) // len(scale)
        rows.append([c * scale[i // size] + minimum[i // size] for i, c in enumerate(whole)])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("bits", "stored"), [(4, 0.5), (6, 0.75), (8, 1.0)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_no_weight_is_further_off_than_half_a_step(bits: int, stored: float, group: int) -> None:
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(bits))
    packed = kernels.pack(weight, bits, group)
    assert packed.codes.numel() == weight.numel() * stored
    assert (packed.num_inputs, packed.group_size) == (256, group)
    groups = weight.view(48, -1, group)
    step = (groups.amax(2) - groups.amin(2)) / (2**bits - 1)
    error = (kernels.unpack(packed) - weight).view(48, -1, group).abs().amax(2)
    assert (error <= step / 2 * 1.001 + 1e-6).all()


def test_groups_without_a_range_are_exact() -> None:
    weight = torch.tensor([0.0, -1.5, 0.25, 3.0]).repeat_interleave(64).expand(3, -1)
    for bits in (4, 6, 8):
        packed = kernels.pack(weight.contiguous(), bits, 64)
        assert torch.equal(kernels.unpack(packed), weight)


def test_rows_are_those_of_the_whole() -> None:
    weight = torch.randn(20, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = kernels.pack(weight, 4, 32)
    which = torch.tensor([3, 19, 3])
    assert torch.equal(kernels.unpack(packed.rows(which)), kernels.unpack(packed)[which])
    assert torch.equal(kernels.unpack(packed.rows(slice(4, 9))), kernels.unpack(packed)[4:9])


def test_large_weights_are_packed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(33, 128, generator=torch.Generator().manual_seed(0))
    whole = kernels.pack(weight, 4, 64)
    monkeypatch.setattr(reference.packed, "_AT_ONCE", 1000)
    parts = kernels.pack(weight, 4, 64)
    assert all(torch.equal(a, b) for a, b in zip(whole[:3], parts[:3], strict=True))

"""llama.cpp's blocks, against the definition of the `gguf` package and products in float64."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from keyhole import kernels
from keyhole.kernels import BlockWeight
from keyhole.models.weights.blocks import FORMATS
from keyhole.models.weights.packing import BlockEmbedding, BlockLinear, replace_weight
from tests.effort import examples
from tests.models.test_gguf import DRAWN, drawn


def rows_of(kind: str, num_rows: int, num_inputs: int, seed: int) -> np.ndarray[Any, Any]:
    """The bytes of random rows."""
    if kind in DRAWN:
        return drawn(kind, (num_rows, num_inputs), seed)
    numbers = np.random.default_rng(seed).normal(size=(num_rows, num_inputs))
    data: np.ndarray[Any, Any] = gguf.quantize(
        numbers.astype(np.float32), GGMLQuantizationType[kind]
    )
    return data


def numbers_of(kind: str, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    numbers: np.ndarray[Any, Any] = gguf.dequantize(data, GGMLQuantizationType[kind])
    return numbers


@pytest.mark.parametrize("kind", FORMATS)
@examples(50)
@given(
    num_rows=st.sampled_from([1, 15, 16, 17, 40]),
    num_blocks=st.integers(1, 5),
    tokens=st.sampled_from([1, 2, 3, 9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_are_those_of_the_stored_numbers(
    kind: str, num_rows: int, num_blocks: int, tokens: int, seed: int
) -> None:
    num_inputs = num_blocks * (256 if kind in DRAWN else 64)
    data = rows_of(kind, num_rows, num_inputs, seed)
    numbers = numbers_of(kind, data)
    weight = FORMATS[kind](torch.from_numpy(data))
    np.testing.assert_allclose(kernels.unpack(weight.expand()), numbers, rtol=1e-6, atol=1e-9)
    x = torch.randn(tokens, num_inputs, generator=torch.Generator().manual_seed(seed % 1000))
    exact = numbers.astype(np.float64)
    found = kernels.packed_linear(x, weight).double().numpy()
    # In units of the sum of absolute products: a few roundings of float32.
    size = np.abs(x.double().numpy()) @ (np.abs(exact).T + np.abs(exact).max())
    assert np.all(np.abs(found - x.double().numpy() @ exact.T) <= 2e-6 * size)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_weight_takes_the_bytes_of_the_file(kind: str) -> None:
    """Q4_K's scales have 6 bits in the file and a byte each in memory: 148 bytes instead of 144.

    Q5_K's weights, too, have 6 bits instead of 5: 212 bytes instead of 176.
    """
    data = rows_of(kind, 8, 512, 0)
    held = sum(part.nbytes for part in FORMATS[kind](torch.from_numpy(data))[:3])
    assert held == data.nbytes * {"Q4_K": 148 / 144, "Q5_K": 212 / 176}.get(kind, 1)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_that_end_within_a_block_are_refused(kind: str) -> None:
    data = torch.from_numpy(rows_of(kind, 4, 512, 0))
    with pytest.raises(RuntimeError, match="unflatten"):
        FORMATS[kind](data[:, :-1])


def test_every_number_of_q6_k_is_its_definition() -> None:
    """All codes under all scales, and scales of blocks that float16 just holds, in float64."""
    scales = np.array([65504.0, -65504.0, 6e-8, -6e-5, 0.0], dtype=np.float16)
    data = drawn("Q6_K", (64, 256 * len(scales)), 5).reshape(64, len(scales), 210)
    data[..., 208:] = scales[:, None].view(np.uint8)
    data[..., 192:208] = np.arange(64 * 16).reshape(64, 1, 16) % 256
    wanted = np.empty((64, len(scales), 256))
    for i in range(256):
        # Of a half, 32 weights share a position in the bytes; `which` of their four follow in turn.
        half, which, at = i // 128, i % 128 // 32, i % 32
        lower = data[..., 64 * half + 32 * (which % 2) + at] >> 4 * (which // 2) & 15
        upper = data[..., 128 + 32 * half + at] >> 2 * which & 3
        codes = (lower + 16 * upper).astype(np.float64) - 32
        of_group = data[..., 192 + i // 16].view(np.int8).astype(np.float64)
        wanted[..., i] = scales.astype(np.float64) * of_group * codes
    found = kernels.unpack(FORMATS["Q6_K"](torch.from_numpy(data.reshape(64, -1))).expand())
    assert np.array_equal(found.numpy(), wanted.reshape(64, -1).astype(np.float32))


@pytest.mark.parametrize("kind", FORMATS)
def test_some_rows_are_those_of_the_whole(kind: str) -> None:
    weight = FORMATS[kind](torch.from_numpy(rows_of(kind, 20, 256, 1)))
    whole = kernels.unpack(weight.expand())
    for which in (slice(3, 9), torch.tensor([19, 0, 0, 7])):
        assert torch.equal(kernels.unpack(weight.rows(which).expand()), whole[which])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 32, 33, 70])
def test_few_and_many_tokens_use_the_same_weight(tokens: int, dtype: torch.dtype) -> None:
    layer, numbers = linear("Q4_K", dtype)
    x = torch.randn(1, tokens, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = x.double() @ numbers.double().T + layer.bias.double()
    found = layer(x)
    assert found.dtype == dtype
    error = (found.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert error < (1e-6 if dtype == torch.float32 else 0.01)
    assert torch.equal(layer.weight, numbers.to(dtype))


def test_an_embedding_looks_up_rows_of_its_dtype() -> None:
    data = rows_of("Q8_0", 30, 64, 2)
    table: nn.Module = nn.Embedding(30, 64)
    replace_weight(table, BlockEmbedding, FORMATS["Q8_0"](torch.from_numpy(data)))
    table.dtype = torch.bfloat16
    ids = torch.tensor([[3, 29, 3]])
    wanted = torch.from_numpy(numbers_of("Q8_0", data)).bfloat16()[ids]
    assert torch.equal(table(ids), wanted)


def linear(kind: str, dtype: torch.dtype) -> tuple[BlockLinear, torch.Tensor]:
    """A layer of 24 outputs, and its weight as numbers."""
    data = rows_of(kind, 24, 512, 3)
    layer = nn.Linear(512, 24, dtype=dtype).requires_grad_(requires_grad=False)
    weight: BlockWeight = FORMATS[kind](torch.from_numpy(data))
    replace_weight(layer, BlockLinear, weight)
    assert isinstance(layer, BlockLinear)
    layer.dtype = dtype
    return layer, torch.from_numpy(numbers_of(kind, data))

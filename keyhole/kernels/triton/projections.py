"""The products of a decoder layer for few tokens, one launch each with norm, SwiGLU or residual.

Such a product reads every weight once: its time is that of the memory, plus that of a launch. So a
program multiplies a few rows of the weights with all of the input, in float32 and without tensor
cores, and many programs load at the same time. The scale of an RMS norm is a factor of the whole
result: it is summed while the weights are read and multiplied at the end, and the result of the
norm is never rounded. A program reads its first weights before it waits for the kernel before it
(`overlap`), and the next ones before it multiplies.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from keyhole.kernels import reference
from keyhole.kernels.reference.layers import Norm, Weight
from keyhole.kernels.triton import overlap

#: Tokens up to which there is a kernel: every token has sums of its own in registers.
MOST_TOKENS = 4
#: Numbers that a thread loads at once: 16 bytes of 16-bit weights. A row of them per pass: then
#: the input is distributed over threads as the weights are, without a copy in shared memory.
_LOADED = 8
#: Columns that a program multiplies at a time, the first that divides the width, and rows at most;
#: tuned on an H200 (benchmarks/LOG.md).
_TILES = (1024, 4), (512, 2), (256, 2)
#: Sums of a thread at most: registers.
_SUMS = 64


# A weight of one row would be a constant, which the choice between weights cannot return.
@triton.jit(do_not_specialize=["first_size", "second_size", "third_size"])
def _project(
    x,
    gain,
    first,
    second,
    third,
    first_bias,
    second_bias,
    third_bias,
    residual,
    out,
    stride_x,
    stride_residual,
    stride_out,
    num_tokens,
    width,
    first_size,
    second_size,
    third_size,
    epsilon,
    COUNT: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A block of rows of one of COUNT weights; with SWIGLU of the same rows of two."""
    block, start = tl.program_id(0), 0
    weight, bias, size = first, first_bias, first_size
    if COUNT > 1:
        blocks = tl.cdiv(first_size, BLOCK)
        if block >= blocks:
            block, start = block - blocks, first_size
            weight, bias, size = second, second_bias, second_size
            if COUNT > 2:
                blocks = tl.cdiv(second_size, BLOCK)
                if block >= blocks:
                    block, start = block - blocks, start + second_size
                    weight, bias, size = third, third_bias, third_size

    # Dimensions: tokens, rows of the weight, columns.
    token, row, column = tl.arange(0, TOKENS), tl.arange(0, BLOCK), tl.arange(0, INNER)
    there = block * BLOCK + row < size
    from_row = block.to(tl.int64) * BLOCK * width + row[None, :, None] * width
    total = tl.zeros([TOKENS, BLOCK, INNER], tl.float32)
    other = tl.zeros([TOKENS, BLOCK, INNER], tl.float32)
    squares = tl.zeros([TOKENS, 1, INNER], tl.float32)
    at = column[None, None, :]
    mask = there[None, :, None] & (at < width)
    read = tl.load(weight + from_row + at, mask, 0.0, eviction_policy="evict_first")
    if SWIGLU:
        read_up = tl.load(second + from_row + at, mask, 0.0, eviction_policy="evict_first")
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    for begin in range(0, width, INNER):
        at = begin + column[None, None, :]
        known = at < width
        mask = (token < num_tokens)[:, None, None] & known
        values = tl.load(x + token[:, None, None] * stride_x + at, mask=mask, other=0.0)
        values = values.to(tl.float32)
        if NORM:
            squares += values * values
            values *= tl.load(gain + at, mask=known, other=0.0).to(tl.float32)
        total += values * read.to(tl.float32)
        at += INNER
        mask = there[None, :, None] & (at < width)
        read = tl.load(weight + from_row + at, mask, 0.0, eviction_policy="evict_first")
        if SWIGLU:
            other += values * read_up.to(tl.float32)
            read_up = tl.load(second + from_row + at, mask, 0.0, eviction_policy="evict_first")

    dtype = out.dtype.element_ty
    result, scale = tl.sum(total, 2), tl.full([TOKENS, 1], 1.0, tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 2) / width + epsilon)
        result *= scale
    row += block * BLOCK
    if BIAS:
        result += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)[None]
    result = result.to(dtype).to(tl.float32)
    if SWIGLU:
        gate = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32)
        result = gate * (tl.sum(other, 2) * scale).to(dtype).to(tl.float32)
    mask = (token < num_tokens)[:, None] & there[None]
    if ADD:
        place = residual + token[:, None] * stride_residual + row[None]
        result += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * stride_out + start + row[None], result.to(dtype), mask=mask)


def _launch(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...] = (),
    norm: Norm | None = None,
    residual: Tensor | None = None,
    *,
    swiglu: bool = False,
) -> Tensor:
    """The results of all weights side by side, [T, sum of their rows]."""
    sizes = [len(weight) for weight in weights]
    (num_tokens, width), total = x.shape, sizes[0] if swiglu else sum(sizes)
    out = x.new_empty(num_tokens, total)
    tokens = triton.next_power_of_2(num_tokens)
    fitting = [tile for tile in _TILES if width % tile[0] == 0]
    inner, rows = fitting[0] if fitting else _TILES[-1]
    products = tokens * (2 if swiglu else 1)
    block = min(rows, _SUMS // (_LOADED * products))
    # Pointers that are not used.
    padded = (*weights, x, x)[:3]
    gain, epsilon = (x, 0.0) if norm is None else norm
    added = x if residual is None else residual
    number = 1 if swiglu else len(weights)
    _project[(sum(-(-size // block) for size in sizes[:number]),)](
        x,
        gain,
        *padded,
        *(*biases, x, x, x)[:3],
        added,
        out,
        x.stride(0),
        added.stride(0),
        out.stride(0),
        num_tokens,
        width,
        *(*sizes, 0, 0)[:3],
        epsilon,
        COUNT=number,
        NORM=norm is not None,
        SWIGLU=swiglu,
        BIAS=bool(biases),
        ADD=residual is not None,
        TOKENS=tokens,
        BLOCK=block,
        INNER=inner,
        num_warps=inner // (32 * _LOADED),
        **overlap.options(),
    )
    return out


def _few(weights: tuple[Weight, ...], x: Tensor) -> TypeGuard[tuple[Tensor, ...]]:
    """Whether there is a kernel for this many tokens of these weights, plain and contiguous."""
    return 0 < len(x) <= MOST_TOKENS and all(
        isinstance(weight, Tensor) and weight.is_contiguous() for weight in weights
    )


def norm_linears(
    x: Tensor, norm: Norm, weights: tuple[Weight, ...], biases: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """As the reference, which computes more tokens, weights or only some biases."""
    given = tuple(bias for bias in biases if bias is not None)
    if not _few(weights, x) or len(weights) > 3 or len(given) not in (0, len(weights)):
        return reference.norm_linears(x, norm, weights, biases)
    found = _launch(x, weights, given, norm)
    return tuple(torch.split(found, [len(weight) for weight in weights], 1))


def norm_swiglu(x: Tensor, norm: Norm, gate: Weight, up: Weight) -> Tensor:
    """As the reference, which computes more tokens."""
    weights = gate, up
    if not _few(weights, x):
        return reference.norm_swiglu(x, norm, gate, up)
    return _launch(x, weights, norm=norm, swiglu=True)


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """As the reference, which computes more tokens."""
    weights = (weight,)
    if not _few(weights, x):
        return reference.linear_add(x, weight, bias, residual)
    return _launch(x, weights, () if bias is None else (bias,), residual=residual)

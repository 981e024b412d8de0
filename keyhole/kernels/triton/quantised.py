"""Keys and values in 8 bits, as kernels read them (`reference.quantised` defines the rows)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: How the numbers of pages are stored, as a constant of a kernel: floats, int8 or e4m3.
_CODES = {torch.int8: 1, torch.uint8: 2}


def code(pages: Tensor) -> int:
    """0 for floats, 1 for int8, 2 for e4m3."""
    return _CODES.get(pages.dtype, 0)


@triton.jit
def widened(bits, CODE: tl.constexpr):
    """Numbers without their scale, as float16, which holds them exactly; e4m3 over 256."""
    if CODE == 2:  # as a float16 of the same exponent and mantissa bits
        wide = bits.to(tl.uint16)
        numbers = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True)
    else:
        numbers = bits.to(tl.float16)
    return numbers


@triton.jit
def scales_of(rows, mask, D: tl.constexpr, CODE: tl.constexpr):
    """The scales behind rows of D numbers, for numbers as `widened` returns them."""
    scale = tl.load((rows + D).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    return scale * 256.0 if CODE == 2 else scale

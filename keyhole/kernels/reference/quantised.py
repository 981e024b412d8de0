"""Keys and values in 8 bits: rows of numbers, each followed by its scale.

A row of D + 4 bytes is the key (or value) of one token and KV head: D numbers of 8 bits, then the
bytes of a float32, their scale. A number is its 8 bits, read as int8 or as e4m3 (FP8: 4 bits of
exponent, 3 of mantissa), times the scale. The scale is the largest magnitude of the row over the
largest number of the format, so each row uses the whole range and an outlier costs its own row
only. Pages of int8 hold int8 rows, pages of uint8 hold e4m3 rows; pages of floats are unquantised.

Because a row is one piece of memory, everything that moves keys and values (pages, offloading,
copies, stored documents) treats it as D + 4 numbers of one byte; only what computes knows of
scales.

A row with a number that is NaN or infinite becomes NaN throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.config import KV_DTYPES, SCALE_BYTES

#: The dtype of pages for a `kv_dtype`.
STORED: dict[str, torch.dtype] = dict(zip(KV_DTYPES[1:], (torch.int8, torch.uint8), strict=True))

_LARGEST = {torch.int8: 127.0, torch.uint8: torch.finfo(torch.float8_e4m3fn).max}


def is_quantised(rows: Tensor) -> bool:
    """Whether these pages or rows have 8 bits per number."""
    return rows.dtype in _LARGEST


def row_dim(rows: Tensor) -> int:
    """The numbers of a row, D, without its scale."""
    return rows.shape[-1] - (SCALE_BYTES if is_quantised(rows) else 0)


def quantise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [..., D] of any float dtype as rows [..., D + 4], int8 or uint8.

    The error of a number is at most half the scale for int8; for e4m3 it is at most 1/16 of the
    number, or scale / 1024 for numbers below scale / 64.
    """
    x, largest = x.float(), _LARGEST[dtype]
    scale = x.abs().amax(-1, keepdim=True) / largest
    # The scale of tiny numbers is subnormal and rounded coarsely, hence the clamp.
    numbers = (x / scale.where(scale > 0, 1.0)).clamp(-largest, largest).nan_to_num(0.0)
    if dtype == torch.int8:
        bits = numbers.round().to(torch.int8)
    else:
        bits = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([bits, scale.view(dtype)], -1)


def dequantised(rows: Tensor) -> Tensor:
    """The numbers of rows: float32 [..., D] for 8 bits, and unquantised rows as they are."""
    if not is_quantised(rows):
        return rows
    numbers, scale = rows.split([row_dim(rows), SCALE_BYTES], -1)
    if rows.dtype == torch.uint8:
        numbers = numbers.view(torch.float8_e4m3fn)
    # A copy, as bytes that do not begin at a multiple of four cannot be viewed as float32.
    scale = scale.clone(memory_format=torch.contiguous_format)
    scaled: Tensor = numbers.float() * scale.view(torch.float32)
    return scaled

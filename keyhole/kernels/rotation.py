"""Turns rotated keys and queries further: RoPE from one position to another.

RoPE (Su et al., RoFormer, arXiv 2104.09864, section 3.2.2, eq. 14-16) turns each pair of numbers of
a vector at position p by the angle p * frequency. Pairs are held in halves: (i, i + half).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Numbers turned at a time on a CPU, 2 MiB in float32: what is between stays in the cache, and no
#: large block of memory is made anew, which costs more than the arithmetic.
_PIECE = 1 << 19


def rotate(x: Tensor, by: Tensor, frequencies: Tensor, last: bool) -> Tensor:
    """Vectors rotated at any positions p, as rotated at p + by.

    x: [..., D], any float dtype. by: int64, broadcasts against x.shape[:-1]; negative too.
    frequencies: float64 [pairs], radians per position. The first 2 * pairs of the D numbers are
    turned, or with `last` the last ones; the rest stays. Float32 arithmetic, rounded once to x's
    dtype. Returns a new tensor.
    """
    by = by[(None,) * (x.dim() - 1 - by.dim())]
    if x.dim() == 1 or x.device.type != "cpu":
        return _turned(x, by, frequencies, last).to(x.dtype)
    turned = torch.empty_like(x)
    rows = max(1, _PIECE // max(1, x[:1].numel()))
    pieces = turned.split(rows)
    places = by.split(rows) if len(by) == len(x) else [by] * len(pieces)
    for out, piece, place in zip(pieces, x.split(rows), places, strict=True):
        out.copy_(_turned(piece, place, frequencies, last))
    return turned


def _turned(x: Tensor, by: Tensor, frequencies: Tensor, last: bool) -> Tensor:
    """Float32 x [..., D] turned by places that broadcast against x.shape[:-1]."""
    # float64 up to the wrap: in float32 the angle at position 100,000 is wrong by 0.004.
    angle = (by[..., None] * frequencies).remainder(2 * math.pi).float()
    cos, sin = angle.cos(), angle.sin()
    pairs = len(frequencies)
    start = x.shape[-1] - 2 * pairs if last else 0
    first, second = slice(start, start + pairs), slice(start + pairs, start + 2 * pairs)
    scale = cos.new_ones(*cos.shape[:-1], x.shape[-1])
    scale[..., first] = scale[..., second] = cos
    x = x.float()
    turned = x * scale
    turned[..., first].addcmul_(x[..., second], sin, value=-1)
    turned[..., second].addcmul_(x[..., first], sin)
    return turned

"""Shifts rotated keys and queries to other positions; all heads of a token share its angles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x,
    by,
    frequencies,
    out,
    stride_token,
    stride_head,
    num_tokens,
    heads,
    START: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST_START: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """A block of tokens. START, REST_START: where the rotated numbers and the others begin."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    known = token < num_tokens
    pair = tl.arange(0, PAIRS_PADDED)
    frequency = tl.load(frequencies + pair, mask=pair < PAIRS, other=0.0)
    # float64 until reduced modulo 2 pi, as the reference; a plain literal would be float32.
    angle = tl.load(by + token, mask=known, other=0).to(tl.float64)[:, None] * frequency[None]
    whole = tl.full([], 6.283185307179586, tl.float64)
    part = tl.full([], 0.15915494309189535, tl.float64)  # of a whole turn, one radian
    angle = (angle - tl.floor(angle * part) * whole).to(tl.float32)
    cos, sin = tl.cos(angle), tl.sin(angle)

    mask = known[:, None] & (pair < PAIRS)[None]
    rest = tl.arange(0, REST_PADDED)
    rest_mask = known[:, None] & (rest < REST)[None]
    dim: tl.constexpr = 2 * PAIRS + REST
    for head in range(0, heads):
        source = (x + token * stride_token + head * stride_head)[:, None]
        target = (out + (token * heads + head) * dim)[:, None]
        at = START + pair[None]
        first = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + at + PAIRS, mask=mask, other=0.0).to(tl.float32)
        dtype = out.dtype.element_ty
        tl.store(target + at, (first * cos - second * sin).to(dtype), mask=mask)
        tl.store(target + at + PAIRS, (second * cos + first * sin).to(dtype), mask=mask)
        if REST > 0:
            at = REST_START + rest[None]
            tl.store(target + at, tl.load(source + at, mask=rest_mask), mask=rest_mask)


def shift_rope(x: Tensor, by: Tensor, frequencies: Tensor, last: bool) -> Tensor:
    """As the reference."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    dim, pairs = x.shape[-1], len(frequencies)
    by = by[(None,) * (x.dim() - 1 - by.dim())]
    # Vectors of one position are contiguous: all heads of a token, or one vector each.
    alike = x.dim() > 1 and by.shape[-1] == 1
    heads = x.shape[-2] if alike else 1
    rows = x.reshape(-1, heads, dim)
    by = by[..., 0].expand(x.shape[:-2]) if alike else by.expand(x.shape[:-1])
    rest, tokens = dim - 2 * pairs, 16
    _rotate[(-(-len(rows) // tokens),)](
        rows,
        by.reshape(-1).contiguous(),
        frequencies.contiguous(),
        out,
        *rows.stride()[:2],
        len(rows),
        heads,
        START=rest if last else 0,
        PAIRS=pairs,
        PAIRS_PADDED=triton.next_power_of_2(pairs),
        REST_START=0 if last else 2 * pairs,
        REST=rest,
        REST_PADDED=triton.next_power_of_2(max(1, rest)),
        TOKENS=tokens,
    )
    return out

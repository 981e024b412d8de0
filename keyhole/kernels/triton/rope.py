"""RoPE applied to new queries and keys, into pages too, and shifts of rotated ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from keyhole.kernels import reference
from keyhole.kernels.triton import overlap
from keyhole.kernels.triton.moves import append

#: Heads of one program: few, so that a step of few tokens still fills the GPU.
_HEADS = 4


@triton.jit
def _turned(source, target, mask, cos1, cos2, sin1, sin2, HALF: tl.constexpr):
    """Rotates some heads of a token, rounding where transformers rounds."""
    dtype = target.dtype.element_ty
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    one, other = (first * cos1).to(dtype), (second * sin1).to(dtype)
    tl.store(target, (one.to(tl.float32) - other.to(tl.float32)).to(dtype), mask=mask)
    one, other = (second * cos2).to(dtype), (first * sin2).to(dtype)
    tl.store(target + HALF, (one.to(tl.float32) + other.to(tl.float32)).to(dtype), mask=mask)


@triton.jit
def _rope(
    key_pages,
    value_pages,
    query,
    key,
    value,
    cos,
    sin,
    slots,
    out_query,
    out_key,
    stride_kp,
    stride_kph,
    stride_kpt,
    stride_vp,
    stride_vph,
    stride_vpt,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
    stride_cos,
    stride_sin,
    num_angles,
    PAGES: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A block of heads of one token: the queries', then the keys', and with PAGES the values'."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF_PADDED)
    angle = token
    if not PAGES:  # sequences of a batch may share their angles
        angle = token % num_angles
    cos, sin = cos + angle * stride_cos, sin + angle * stride_sin
    cos1 = tl.load(cos + d, mask=d < HALF, other=0.0).to(tl.float32)[None]
    cos2 = tl.load(cos + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None]
    sin1 = tl.load(sin + d, mask=d < HALF, other=0.0).to(tl.float32)[None]
    sin2 = tl.load(sin + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None]

    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    mask = (head < QUERY_HEADS)[:, None] & (d < HALF)[None]
    source = query + token * stride_q + head[:, None] * stride_qh + d[None]
    target = out_query + (token * QUERY_HEADS + head[:, None]) * 2 * HALF + d[None]
    _turned(source, target, mask, cos1, cos2, sin1, sin2, HALF)

    if PAGES:
        slot = tl.load(slots + token)
        page, place = slot // SIZE, slot % SIZE
    head -= QUERY_HEADS
    mask = ((head >= 0) & (head < KEY_HEADS))[:, None] & (d < HALF)[None]
    source = key + token * stride_k + head[:, None] * stride_kh + d[None]
    target = out_key + (token * KEY_HEADS + head[:, None]) * 2 * HALF + d[None]
    _turned(source, target, mask, cos1, cos2, sin1, sin2, HALF)
    if PAGES:
        target = key_pages + page * stride_kp + place * stride_kpt + head[:, None] * stride_kph
        _turned(source, target + d[None], mask, cos1, cos2, sin1, sin2, HALF)

        head -= KEY_HEADS
        mask = ((head >= 0) & (head < KEY_HEADS))[:, None] & (d < HALF)[None]
        source = value + token * stride_v + head[:, None] * stride_vh + d[None]
        target = value_pages + page * stride_vp + place * stride_vpt + head[:, None] * stride_vph
        tl.store(target + d[None], tl.load(source, mask=mask), mask=mask)
        tl.store(target + HALF + d[None], tl.load(source + HALF, mask=mask), mask=mask)


def _apply(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, pages: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Rotates queries [T, Hq, D] and keys [T, Hkv, D]; cos and sin [n, D] repeat every n tokens.

    pages: of keys and of values, new values [T, Hkv, D] and the slots where they are written, too.
    """
    (tokens, query_heads, dim), key_heads = query.shape, key.shape[1]
    out_query, out_key = query.new_empty(query.shape), key.new_empty(key.shape)
    key_pages, value_pages, value, slots = pages or (key,) * 4  # pointers that are not used
    heads = query_heads + (2 if pages else 1) * key_heads
    if tokens:
        _rope[tokens, -(-heads // _HEADS)](
            key_pages,
            value_pages,
            query,
            key,
            value,
            cos,
            sin,
            slots,
            out_query,
            out_key,
            *key_pages.stride()[:3],
            *value_pages.stride()[:3],
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            len(cos),
            PAGES=bool(pages),
            QUERY_HEADS=query_heads,
            KEY_HEADS=key_heads,
            SIZE=key_pages.shape[2],
            HALF=dim // 2,
            HALF_PADDED=triton.next_power_of_2(dim // 2),
            HEADS=_HEADS,
            num_warps=2,
            **overlap.options(),
        )
    return out_query, out_key


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference. The heads of a token are contiguous in the output."""
    batch, tokens = len(query), query.shape[2]
    query, key = (x.transpose(1, 2).flatten(0, 1) for x in (query, key))
    turned = _apply(query, key, cos.flatten(0, 1), sin.flatten(0, 1))
    query, key = (x.unflatten(0, (batch, tokens)).transpose(1, 2) for x in turned)
    return query, key


def apply_rope_and_append(
    key_pages: Tensor,
    value_pages: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """As the reference; in two launches for pages of 8 bits and values of another size."""
    if reference.is_quantised(key_pages) or value.shape[2] != query.shape[2]:
        query, key = _apply(query, key, cos, sin)
        append(key_pages, value_pages, key, value, slots)
        return query, key
    pages = key_pages, value_pages, value, slots.long().contiguous()
    return _apply(query, key, cos, sin, pages)


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
    for head in range(heads):
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

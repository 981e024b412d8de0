"""New keys and values into their pages: one program per token and KV head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _append(
    key_pages,
    value_pages,
    key,
    value,
    slots,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_vp,
    stride_vh,
    stride_vt,
    stride_key,
    stride_key_head,
    stride_value,
    stride_value_head,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    page, place = slot // SIZE, slot % SIZE
    d = tl.arange(0, D_PADDED)
    row = tl.load(key + token * stride_key + head * stride_key_head + d, mask=d < D)
    into = key_pages + page * stride_kp + head * stride_kh + place * stride_kt
    tl.store(into + d, row, mask=d < D)
    if DV > 0:
        d = tl.arange(0, DV_PADDED)
        row = tl.load(value + token * stride_value + head * stride_value_head + d, mask=d < DV)
        into = value_pages + page * stride_vp + head * stride_vh + place * stride_vt
        tl.store(into + d, row, mask=d < DV)


def append(
    key_pages: Tensor,
    value_pages: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
) -> None:
    """As the reference."""
    num_tokens, num_kv_heads, dim = key.shape
    if not num_tokens:
        return
    value_dim = 0
    if value_pages is None or value is None:
        value_pages, value = key_pages, key  # pointers that are not used
    else:
        value_dim = value.shape[2]
    _append[num_tokens, num_kv_heads](
        key_pages,
        value_pages,
        key,
        value,
        slots.long().contiguous(),
        *key_pages.stride()[:3],
        *value_pages.stride()[:3],
        *key.stride()[:2],
        *value.stride()[:2],
        SIZE=key_pages.shape[2],
        D=dim,
        DV=value_dim,
        D_PADDED=triton.next_power_of_2(dim),
        DV_PADDED=triton.next_power_of_2(max(1, value_dim)),
    )

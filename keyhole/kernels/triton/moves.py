"""Keys and values that are copied: new ones into their pages, selected ones into buffers.

`append` has one program per token and KV head. In elastic loading (`load_missing`) tensor
operations of fixed shapes assign entries to slots; then one kernel copies all misses, each from its
page into its slot. The pages may be in pinned host memory, which the GPU reads over its bus: only
misses cross it, and the host never waits for a list of misses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keyhole.kernels import reference
from keyhole.kernels.selection import Selection


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
    """As the reference; floats for pages of 8 bits are quantised by torch and then copied."""
    if reference.is_quantised(key_pages) and not reference.is_quantised(key):
        key = reference.quantise(key, key_pages.dtype)
        value = None if value is None else reference.quantise(value, key_pages.dtype)
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


@triton.jit
def _copy(
    sources,
    keys,
    values,
    key_pages,
    value_pages,
    page_table,
    lengths,
    rows,
    stride_k,
    stride_kh,
    stride_kt,
    stride_v,
    stride_vh,
    stride_vt,
    stride_kp,
    stride_kph,
    stride_kpt,
    stride_vp,
    stride_vph,
    stride_vpt,
    stride_table,
    num_slots,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DIMS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """A block of one sequence's buffer, for one KV head."""
    number = tl.program_id(0)
    sequence, head = (number // HEADS).to(tl.int64), (number % HEADS).to(tl.int64)
    place = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    slot = place // UNIT
    entries = sources + number.to(tl.int64) * num_slots
    entry = tl.load(entries + slot, mask=slot < num_slots, other=-1)
    position = entry * UNIT + place % UNIT
    # `append` writes the newest token.
    known = (entry >= 0) & (position < tl.load(lengths + sequence) - 1)
    position = tl.where(known, position, 0)
    table = page_table + sequence * stride_table
    page = tl.load(table + position // SIZE, mask=known, other=0).to(tl.int64)
    own = tl.load(rows + sequence) * (num_slots * UNIT // SIZE) + place // SIZE
    source = key_pages + page * stride_kp + head * stride_kph + position % SIZE * stride_kpt
    target = keys + own * stride_k + head * stride_kh + place % SIZE * stride_kt
    for start in tl.static_range(0, D, DIMS):
        d = start + tl.arange(0, DIMS)
        mask = known[:, None] & (d < D)[None]
        tl.store(target[:, None] + d[None], tl.load(source[:, None] + d[None], mask=mask), mask)
    source = value_pages + page * stride_vp + head * stride_vph + position % SIZE * stride_vpt
    target = values + own * stride_v + head * stride_vh + place % SIZE * stride_vt
    for start in tl.static_range(0, DV, DIMS):
        d = start + tl.arange(0, DIMS)
        mask = known[:, None] & (d < DV)[None]
        tl.store(target[:, None] + d[None], tl.load(source[:, None] + d[None], mask=mask), mask)


def load_missing(
    entries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    key_pages: Tensor,
    value_pages: Tensor | None,
    page_table: Tensor,
    lengths: Tensor,
    rows: Tensor,
    *,
    selection: Selection,
) -> tuple[Selection, Tensor]:
    """As the reference."""
    assert selection.indices.shape[2] < entries.shape[2], "the last slot is the newest entry's"
    indices, unit = selection.indices, selection.unit
    num_slots, (_, heads, size, dim) = entries.shape[2], keys.shape
    num_entries, last = page_table.shape[1] * size // unit, num_slots - 1
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    rows, lengths = rows.long().contiguous(), lengths.long()
    newest = ((lengths - 1) // unit)[:, None, None].expand(-1, heads, -1)

    held = entries[rows][..., :last].long()
    held = held.masked_fill(held >= newest, -1)  # stale: from when the sequence was longer
    listed = indices.long().expand(-1, heads, -1)
    wanted = reference.members(listed.masked_fill(listed >= newest, -1), num_entries)
    kept = (held >= 0) & wanted.gather(2, held.clamp(min=0))
    missing = wanted & ~reference.members(held, num_entries)
    free = (kept.int() + (held >= 0).int()).argsort(dim=-1, stable=True)  # empty, stale, kept
    rank = (missing.cumsum(-1) - 1).clamp(min=0, max=last - 1)
    # Entries that are not missing go to the last slot, which the newest entry then overwrites.
    slot = free.gather(2, rank).masked_fill(~missing, last)
    entry = torch.arange(num_entries, device=keys.device).expand_as(slot)
    sources = torch.full((*held.shape[:2], num_slots), -1, device=keys.device)
    sources.scatter_(2, slot, entry)
    sources[..., last:] = newest

    placed = sources[..., :last] >= 0
    held = torch.where(placed, sources[..., :last], held)
    value_dim = 0
    if values is None or value_pages is None:
        values, value_pages = keys, key_pages  # pointers that are not used
    else:
        value_dim = values.shape[3]
    tokens = 16
    _copy[len(rows) * heads, -(-num_slots * unit // tokens)](
        sources,
        keys,
        values,
        key_pages,
        value_pages,
        page_table,
        lengths,
        rows,
        *keys.stride()[:3],
        *values.stride()[:3],
        *key_pages.stride()[:3],
        *value_pages.stride()[:3],
        page_table.stride(0),
        num_slots,
        HEADS=heads,
        SIZE=size,
        UNIT=unit,
        D=dim,
        DV=value_dim,
        DIMS=min(128, triton.next_power_of_2(dim)),
        TOKENS=tokens,
    )
    entries[rows] = torch.cat([held, newest], -1).int()

    read = torch.cat([held.masked_fill(~(kept | placed), num_entries), newest], -1)
    read, slots = read.sort(dim=-1, stable=True)
    read, slots = (found[..., : indices.shape[2]] for found in (read, slots))
    counts = (read < num_entries).sum(-1, dtype=torch.int32)
    written = lengths - 1 - newest[:, 0, 0] * unit  # of the newest entry
    moved = (missing.sum(-1) * unit + written[:, None]).int()
    slots = slots.masked_fill(read == num_entries, -1).int()
    return Selection(slots, counts, unit), moved

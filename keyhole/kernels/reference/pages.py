"""New tokens written into pages, pages read block by block, and entries loaded into buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.kernels.reference.quantised import dequantised, is_quantised, quantise
from keyhole.kernels.selection import Selection

# Numbers of keys or values gathered at once. On a CPU small buffers stay in the caches: at 32k
# tokens this is seven times as fast as gathering all (benchmarks/LOG.md). A GPU wants few and large
# steps.
_GATHERED = {"cpu": 1 << 19}
_GATHERED_ELSEWHERE = 1 << 26


def append(
    key_pages: Tensor,
    value_pages: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
) -> None:
    """Writes new tokens into their pages, in place.

    key_pages [P, Hkv, page_size, D], key [T, Hkv, D]; value_pages [P, Hkv, page_size, Dv] and
    value [T, Hkv, Dv], or None for both where values are part of the keys; slots int64 [T]:
    page * page_size + place. Pages of 8 bits take floats, which are quantised, or rows as they are.
    """
    page_size = key_pages.shape[2]
    slots = slots.to(key_pages.device)
    page, place = slots // page_size, slots % page_size
    for pages, rows in ((key_pages, key), (value_pages, value)):
        if pages is not None and rows is not None:
            if is_quantised(pages) and not is_quantised(rows):
                rows = quantise(rows, pages.dtype)
            pages[page, :, place] = rows.to(pages.device)


def gathered(pages: Tensor, index: tuple[Tensor, ...], device: torch.device) -> Tensor:
    """The entries at `index`, copied to `device` if the pages are elsewhere."""
    return pages[tuple(i.to(pages.device) for i in index)].to(device)


def gather_tokens(pages_of: Tensor, pages: Tensor, tokens: Tensor) -> Tensor:
    """Keys or values of some tokens of a sequence, [n, Hkv, D], a copy; float32 of 8-bit pages.

    pages_of [P, Hkv, page_size, D]; pages int64 [M], the sequence's pages in order; tokens int64.
    """
    return dequantised(gather_rows(pages_of, pages, tokens))


def gather_rows(pages_of: Tensor, pages: Tensor, tokens: Tensor) -> Tensor:
    """`gather_tokens`, as the pages store them."""
    size = pages_of.shape[2]
    place = pages[tokens // size].to(pages_of.device), (tokens % size).to(pages_of.device)
    return pages_of[place[0], :, place[1]].to(tokens.device)


@dataclass(frozen=True)
class PageReads:
    """The tokens that a decode step reads, as indices into pages.

    where: the index of n entries (pages or tokens) per sequence and KV head. size: tokens of an
    entry. valid: bool [B, Hkv or 1, n * size], False for padding and for masked tokens.
    """

    where: tuple[Tensor, ...]
    size: int
    valid: Tensor

    def blocks(self, pages: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Blocks of the keys or values, float32 [B, Hkv, m, D], and the tokens that they hold."""
        entries = self.valid.shape[-1] // self.size
        numbers = self.valid.shape[0] * pages.shape[1] * self.size * pages.shape[-1]
        step = max(1, _GATHERED.get(pages.device.type, _GATHERED_ELSEWHERE) // numbers)
        for start in range(0, entries, step):
            end = min(start + step, entries)
            index = tuple(i[..., start:end] if i.shape[-1] == entries else i for i in self.where)
            part = gathered(pages, index, self.valid.device)
            part = part.flatten(2, 3) if part.dim() > 4 else part  # whole pages
            yield dequantised(part).float(), slice(start * self.size, end * self.size)


def reads_of(
    key_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    selection: Selection | None,
    window: int | None,
) -> PageReads:
    """What `attend` reads: all pages of the table or the selection, masked to the last `window`."""
    position, where = _places(page_table, selection, key_pages.shape[1], key_pages.shape[2])
    valid = (position >= 0) & (position < lengths[:, None, None])
    if window is not None:
        valid &= position >= (lengths - window)[:, None, None]
    size = key_pages.shape[2] if selection is None else selection.unit
    return PageReads(where, size, valid.expand(len(lengths), -1, -1))


def _places(
    page_table: Tensor, selection: Selection | None, num_kv_heads: int, page_size: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Token positions [B, Hkv or 1, n] (negative: padding) and the index that reads them."""
    head = torch.arange(num_kv_heads, device=page_table.device)[None, :, None]
    place = torch.arange(page_size, device=page_table.device)
    table = page_table.long()[:, None]
    if selection is None:
        pages = torch.arange(page_table.shape[1], device=page_table.device)[None, None]
        position = (pages[..., None] * page_size + place).flatten(2)
        return position, (table, head)
    indices = selection.indices.long()
    table = table.expand(-1, indices.shape[1], -1)
    safe = indices.clamp(min=0)
    if selection.unit == 1:
        physical = table.gather(2, safe // page_size)
        return indices, (physical, head, safe % page_size)
    physical = table.gather(2, safe)
    position = indices[..., None] * page_size + place
    return position.flatten(2), (physical, head)


def window_pages(lengths: Tensor, window: int, page_size: int, num_pages: int) -> Selection | None:
    """The pages that hold the last `window` tokens; None where that may be all of them."""
    count = (window + page_size - 2) // page_size + 1
    if count >= num_pages:
        return None
    last = (lengths.long() - 1) // page_size
    back = torch.arange(count - 1, -1, -1, device=lengths.device)
    first = (last + 1 - count).clamp(min=0)
    indices = first[:, None] + (count - 1 - back)
    indices = indices.masked_fill(indices > last[:, None], -1)
    counts = (indices >= 0).sum(1, dtype=torch.int32)
    return Selection(indices.int()[:, None], counts[:, None], page_size)


def members(listed: Tensor, count: int) -> Tensor:
    """Which of `count` entries are in lists [..., n], padded with -1. Bool [..., count]."""
    found = listed.new_zeros(*listed.shape[:-1], count + 1, dtype=torch.bool)
    found.scatter_(-1, listed.long().where(listed >= 0, count), True)
    there: Tensor = found[..., :count]
    return there


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
    """Copies selected entries that are missing into the buffers of sequences.

    SpeContext's elastic loading (section 5.4): S_now - S_last is copied and replaces S_last -
    S_now. keys [R * m, H, page_size, D], values [R * m, H, page_size, Dv]: the buffers of R
    sequences, m pages each, written in place; the values are None where they are part of the keys.
    A buffer is cut into S slots of one entry (token or page) each, and entries int32 [R, H, S]
    holds the entry of each slot, -1 for none. key_pages [P, H, page_size, D] and value_pages hold
    all tokens. rows int64 [B]: the buffer of each sequence, all different. selection: indices [B, H
    or 1, n] with n < S, in any order, repetitions allowed; the newest entry is among them.

    The last slot belongs to the newest entry, so that unfilled positions come last. All its tokens
    are copied except the newest token, which `append` writes. Misses take empty slots first, then
    those of entries that are not selected, in order. Entries that are no longer selected stay until
    then, as they may be selected again.

    Returns the slots to attend to, [B, H, n], in the order of their entries: attention, which
    splits a list by its length and sums in its order, then rounds as it does over the pages. Also
    returns int32 [B, H], the number of tokens copied.
    """
    assert selection.indices.shape[2] < entries.shape[2], "the last slot is the newest entry's"
    unit, size, heads = selection.unit, keys.shape[2], keys.shape[1]
    num_entries, last = page_table.shape[1] * size // unit, entries.shape[2] - 1
    rows, lengths = rows.long(), lengths.long()
    newest = ((lengths - 1) // unit)[:, None, None]

    held = entries[rows][..., :last].long()
    held = held.masked_fill(held >= newest, -1)  # stale: from when the sequence was longer
    listed = selection.indices.long().expand(-1, heads, -1)
    wanted = members(listed.masked_fill(listed >= newest, -1), num_entries)
    kept = (held >= 0) & wanted.gather(2, held.clamp(min=0))
    missing = wanted & ~members(held, num_entries)
    free = (kept.int() + (held >= 0).int()).argsort(dim=-1, stable=True)  # empty, stale, kept
    row, head, entry = missing.nonzero(as_tuple=True)
    slot = free[row, head, (missing.cumsum(-1) - 1)[row, head, entry]]
    held[row, head, slot] = entry
    kept[row, head, slot] = True

    token = torch.arange(unit, device=keys.device)
    known = lengths - 1 - newest[:, 0, 0] * unit  # tokens of the newest entry that are written
    newest_row, place = (token < known[:, None]).nonzero(as_tuple=True)
    every = torch.arange(heads, device=keys.device)
    copies = [
        (row[:, None], head[:, None], entry[:, None] * unit + token, slot[:, None] * unit + token),
        (
            newest_row[:, None],
            every,
            newest[newest_row, 0] * unit + place[:, None],
            (last * unit + place)[:, None],
        ),
    ]
    num_pages = entries.shape[2] * unit // size
    for row, head, source, target in copies:
        page, own = page_table.long()[row, source // size], rows[row] * num_pages + target // size
        for buffer, pages in ((keys, key_pages), (values, value_pages)):
            if buffer is not None and pages is not None:
                rows_below = gathered(pages, (page, head, source % size), buffer.device)
                buffer[own, head, target % size] = rows_below

    entries[rows] = torch.cat([held, newest.expand(-1, heads, -1)], -1).int()

    read = torch.cat([held.masked_fill(~kept, num_entries), newest.expand(-1, heads, -1)], -1)
    read, slots = read.sort(dim=-1, stable=True)
    read, slots = (found[..., : listed.shape[2]] for found in (read, slots))
    counts = (read < num_entries).sum(-1, dtype=torch.int32)
    moved = missing.sum(-1) * unit + known[:, None]
    slots = slots.masked_fill(read == num_entries, -1)
    return Selection(slots.int(), counts, unit), moved.int()

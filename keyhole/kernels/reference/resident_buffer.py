"""Elastic loading in plain PyTorch: the definition that every other backend is tested against.

SpeContext (2025), section 5.4. Pages on another device are gathered there, as in `reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.kernels import reference
from keyhole.kernels.selection import Selection


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
    wanted = reference.members(listed.masked_fill(listed >= newest, -1), num_entries)
    kept = (held >= 0) & wanted.gather(2, held.clamp(min=0))
    missing = wanted & ~reference.members(held, num_entries)
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
                rows_below = reference.gathered(pages, (page, head, source % size), buffer.device)
                buffer[own, head, target % size] = rows_below

    entries[rows] = torch.cat([held, newest.expand(-1, heads, -1)], -1).int()

    read = torch.cat([held.masked_fill(~kept, num_entries), newest.expand(-1, heads, -1)], -1)
    read, slots = read.sort(dim=-1, stable=True)
    read, slots = (found[..., : listed.shape[2]] for found in (read, slots))
    counts = (read < num_entries).sum(-1, dtype=torch.int32)
    moved = missing.sum(-1) * unit + known[:, None]
    slots = slots.masked_fill(read == num_entries, -1)
    return Selection(slots.int(), counts, unit), moved.int()

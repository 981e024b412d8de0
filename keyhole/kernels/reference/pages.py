"""Writing new tokens into pages, and reading pages block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
    page * page_size + place.
    """
    page_size = key_pages.shape[2]
    slots = slots.to(key_pages.device)
    page, place = slots // page_size, slots % page_size
    key_pages[page, :, place] = key.to(key_pages.device)
    if value_pages is not None and value is not None:
        value_pages[page, :, place] = value.to(value_pages.device)


def gathered(pages: Tensor, index: tuple[Tensor, ...], device: torch.device) -> Tensor:
    """The entries at `index`, copied to `device` if the pages are elsewhere."""
    return pages[tuple(i.to(pages.device) for i in index)].to(device)


def gather_tokens(pages_of: Tensor, pages: Tensor, tokens: Tensor) -> Tensor:
    """Keys or values of some tokens of a sequence, [n, Hkv, D], a copy.

    pages_of [P, Hkv, page_size, D]; pages int64 [M], the sequence's pages in order; tokens int64.
    """
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
            yield part.float(), slice(start * self.size, end * self.size)


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

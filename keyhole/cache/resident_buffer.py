"""The resident part of an offloaded layer: a buffer per sequence, loaded by difference.

SpeContext, section 5.4: consecutive steps select similar tokens (over 80%, figure 6b), so only
S_now - S_last is copied, into the slots of S_last - S_now. The buffers of a layer form a small
paged cache in the same layout, so the same attention kernels read them.

Differences from the paper: a slot holds a token or a page, as the policy selects, since a page is
one copy instead of sixteen; there is one page more than the budget, whose slots hold the newest
token or page and recently selected ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole import kernels
from keyhole.cache import huge_pages
from keyhole.cache.layout import LayerLayout
from keyhole.cache.pages import keys_and_values
from keyhole.kernels import Selection


@dataclass(frozen=True)
class Frame:
    """The decoding sequences of a step, and their rows in the buffers of every layer.

    rows: int64 [B], the buffer of each sequence. page_table int32 [B, M], lengths int32 [B]: those
    of the step. own_table int32 [B, m], own_lengths int32 [B]: those of the buffers. newest: int64
    [B], the slot of the newest token, as in `kernels.append`.
    """

    rows: Tensor
    page_table: Tensor
    lengths: Tensor
    own_table: Tensor
    own_lengths: Tensor
    newest: Tensor

    @classmethod
    def of(
        cls,
        rows: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        *,
        num_tokens: int,
        page_size: int,
        unit: int,
    ) -> Frame:
        """For buffers of `num_tokens` tokens in slots of `unit` tokens."""
        pages = num_tokens // page_size
        own_table = rows[:, None] * pages + torch.arange(pages, device=rows.device)
        place = num_tokens - unit + (lengths.long() - 1) % unit
        newest = rows * num_tokens + place
        own_lengths = (place + 1).to(torch.int32)
        return cls(rows, page_table, lengths, own_table.to(torch.int32), own_lengths, newest)


@dataclass(frozen=True)
class Resident:
    """A layer's selection in a step, in its buffers instead of the cache.

    moved: int32 [B, H], tokens that were copied for it.
    """

    keys: Tensor
    values: Tensor
    frame: Frame
    selection: Selection
    moved: Tensor

    @property
    def paged(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, page table and lengths, as in `kernels.attend`."""
        return self.keys, self.values, self.frame.own_table, self.frame.own_lengths

    def append(self, key: Tensor, value: Tensor | None) -> None:
        """Writes the newest tokens here too, before attention: key [B, Hkv, D], value [B, Hkv, Dv].

        value None: it is part of the key.
        """
        heads = self.keys.shape[1]
        key = key.expand(-1, heads, -1)
        value = None if value is None else value.expand(-1, heads, -1)
        kernels.append(
            self.keys, None if value is None else self.values, key, value, self.frame.newest
        )


class ResidentBuffer:
    """The buffers of one layer, for `num_rows` sequences.

    keys, values: [num_rows * m, H, page_size, D or Dv]; sequence r has m pages from r * m on.
    entries: int32 [num_rows, H, places], the token or page in each slot, -1 for none.
    cuts: how often its slots changed their unit while it was in use.
    num_heads: H, where there are more lists than KV heads (MLA: a selection per query head over
    shared latents); None: the layer's KV heads.
    """

    def __init__(
        self,
        layout: LayerLayout,
        like: Tensor,
        *,
        page_size: int,
        num_rows: int,
        num_tokens: int,
        num_heads: int | None = None,
    ) -> None:
        assert num_tokens % page_size == 0
        assert num_heads is None or layout.num_kv_heads in (1, num_heads)
        self.num_tokens = num_tokens
        self._page_size = page_size
        self._shared = layout.shared_values
        heads = num_heads or layout.num_kv_heads
        shape = (num_rows * (num_tokens // page_size), heads, page_size * layout.numbers_per_head)
        pages = huge_pages.new_empty(like, *shape)
        self.keys, self.values = keys_and_values(pages, layout, page_size)
        self.token_bytes = layout.numbers_per_head * pages.itemsize
        self.entries = self._no_entries(page_size)
        self.cuts = 0
        self._in_use = False

    @property
    def unit(self) -> int:
        """Tokens per slot."""
        return self.num_tokens // self.entries.shape[2]

    def load_missing(
        self, selection: Selection, frame: Frame, key_pages: Tensor, value_pages: Tensor
    ) -> Resident:
        """Loads the selected entries that are missing from the offloaded pages [P, Hkv, ...].

        The newest token is in neither; `Resident.append` writes it here. selection: at most
        num_tokens - page_size tokens; a change of unit empties the buffer.
        """
        if selection.unit != self.unit:
            self.entries = self._no_entries(selection.unit)
            self.cuts += self._in_use
        self._in_use = True
        heads = self.keys.shape[1]
        used, moved = kernels.load_missing(
            self.entries,
            self.keys,
            None if self._shared else self.values,
            key_pages.expand(-1, heads, -1, -1),
            None if self._shared else value_pages.expand(-1, heads, -1, -1),
            frame.page_table,
            frame.lengths,
            frame.rows,
            selection=selection,
        )
        return Resident(self.keys, self.values, frame, used, moved)

    def reset(self, row: int) -> None:
        """Drops a sequence's entries."""
        self.entries[row] = -1

    def _no_entries(self, unit: int) -> Tensor:
        pages = self.num_tokens // self._page_size
        rows, heads = len(self.keys) // pages, self.keys.shape[1]
        shape = (rows, heads, self.num_tokens // unit)
        return torch.full(shape, -1, dtype=torch.int32, device=self.keys.device)

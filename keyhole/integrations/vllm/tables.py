"""A selection as page tables and lengths, with which attention reads only the selected pages.

The pages of a selection are in ascending order, and only the last one may be partly filled, so an
attention kernel needs nothing more than a shorter table and a shorter length. Lists per KV head
read pages of one head each: page p of head h is page `p * Hkv + h` of a pool seen as one-head
pages, and each head is one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.kernels import Selection
from keyhole.policies.base import Step


@dataclass(frozen=True, eq=False, kw_only=True)
class Tables:
    """What a layer reads in a decode step, for vLLM's attention.

    page_table: int32 [B * H, n], padded with page 0, vLLM's null block. lengths: int32 [B * H].
    lists: H, the lists per row: 1, or the number of KV heads or query heads. max_length: an upper
    bound of `lengths`. pages: int64 [], total pages read by all rows and lists.
    """

    page_table: Tensor
    lengths: Tensor
    lists: int
    max_length: int
    pages: Tensor


def tables_of(selection: Selection, step: Step, num_kv_heads: int) -> Tables:
    """The tables of a selection of pages."""
    assert selection.unit == step.page_size, "page_policy lets policies of whole pages through only"
    B, H, n = selection.indices.shape
    chosen = selection.indices.long()
    table = step.page_table.long()[:, None].expand(-1, H, -1)
    physical = table.gather(2, chosen.clamp(min=0))
    if H > 1:
        head = torch.arange(H, device=chosen.device) // (H // num_kv_heads)
        physical = physical * num_kv_heads + head[None, :, None]
    physical = physical.masked_fill(chosen < 0, 0)
    missing = step.pages * step.page_size - step.lengths  # in the newest page
    lengths = selection.counts * step.page_size - missing[:, None]
    return Tables(
        page_table=physical.to(torch.int32).view(B * H, n),
        lengths=lengths.to(torch.int32).expand(B, H).reshape(B * H),
        lists=H,
        max_length=min(n * step.page_size, step.max_length),
        pages=selection.counts.sum(),
    )

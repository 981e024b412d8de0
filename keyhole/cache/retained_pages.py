"""The retained pages of a step's decoding sequences, where a policy evicts pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from keyhole.cache.kept_tokens import KeptTokenRows


@dataclass(frozen=True)
class RetainedPages:
    """Pages that full-attention layers still read, as a compact list.

    Keys are rotated to their true positions, so attention needs only the order and number of the
    pages. W: the most entries of any sequence.

    page_table: int32 [B, W], physical pages; the rest of a row is 0. pages: int32 [B], entries.
    lengths: int32 [B], tokens in them, the newest included. pinned: int64 [B], how many of the
    first entries belong to the prompt and are never evicted. goes: bool [B], `due` on the device.
    entries: int64 [B, W], on the host: which page of the sequence each one is; the rest is -1.
    most_generated: the most entries of any sequence that are not pinned.
    due: bool [B], on the host: sequences that evict a page before their next token.
    kept_tokens: as in `Step`, with these lengths.
    """

    page_table: Tensor
    pages: Tensor
    lengths: Tensor
    pinned: Tensor
    goes: Tensor
    entries: np.ndarray
    most_generated: int
    due: np.ndarray
    kept_tokens: KeptTokenRows | None = None

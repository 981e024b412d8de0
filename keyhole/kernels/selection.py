"""The operands of a decode step: what it may read, what it reads, which scores it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class PagedQuery(NamedTuple):
    """The newest token of each sequence of a decode step, and the pages that it may attend to.

    query [B, Hq, D]; key_pages [P, Hkv, page_size, D]; value_pages [P, Hkv, page_size, Dv];
    page_table int32 [B, M]; lengths int32 [B], the newest token included.
    """

    query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    page_table: Tensor
    lengths: Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """Tokens or pages to attend to, for every sequence of a decode step.

    indices: int32 [B, H, n], ascending and unique along n, padded with -1 at the end. H is the
    number of KV heads, or 1 if all heads share one selection, or the number of query heads if each
    has its own (`attend_per_query_head`).
    counts: int32 [B, H], how many entries are real. The newest token is always among them.
    unit: tokens per entry: 1 (token positions) or the page size (page numbers of the sequence).
    low_rank: low-rank keys that replace some of the keys, for a selection of tokens.
    """

    indices: Tensor
    counts: Tensor
    unit: int
    low_rank: LowRank | None = None

    def row(self, number: int) -> Selection:
        """A copy of what one of the sequences attends to."""
        return Selection(self.indices[number][None].clone(), self.counts[number][None], self.unit)


@dataclass(frozen=True)
class ScoreRequest:
    """Attention weights wanted from a full-attention decode step, reduced over query heads.

    reduce: "max" or "sum" over all query heads, for each token; "group_max": the largest of each
    group, one score per KV head; "none": one score per query head, for measurements, computed by
    the reference.
    unit: 1 for a score per token, the page size for the sum over each page.
    """

    reduce: Literal["max", "sum", "group_max", "none"]
    unit: int


@dataclass(frozen=True, eq=False, kw_only=True)
class LowRank:
    """Low-rank keys that replace some of the keys of a layer.

    coefficients [P, page_size, rank], shared by all heads; basis [B, rank, Hkv, D], both of the
    keys' dtype. Full keys are read for tokens from first, int32 [B], on, and for chunks of `chunk`
    tokens in taken, int32 [B, Hkv, k], padded with -1. frequencies and last: how RoPE is re-applied
    to keys, as in `Rotation`.
    """

    coefficients: Tensor
    basis: Tensor
    first: Tensor
    taken: Tensor
    chunk: int
    frequencies: Tensor | None
    last: bool

"""The two ends of reuse: everything is recomputed, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from keyhole.config import setting
from keyhole.reuse.base import PlacedDocument, RecomputePlan, Reuse, starts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Recompute(Reuse):
    """Recomputes everything, exactly.

    Recompute: the whole prompt is computed, ignoring stored documents. The exact reference.

    Cost per prompt: a prefill of all documents.

    When to use it: for exact answers, and as the reference for the other methods.
    """

    name: ClassVar[str] = "recompute"
    exact: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = True

    def plan(
        self, documents: Sequence[PlacedDocument], query: Sequence[Tensor] | None
    ) -> RecomputePlan:
        """Everything is kept and recomputed."""
        shape = len(documents[0].layers), starts(documents)[-1]
        every = torch.ones(shape, dtype=torch.bool)
        return RecomputePlan(every, every.clone())


@dataclass(frozen=True, kw_only=True)
class FullReuse(Reuse):
    """All stored keys and values, unchanged.

    Full reuse: stored documents are concatenated and nothing is recomputed.

    The papers' baseline. They leave keys at the positions where the documents were encoded, which
    alone ruins the answers (SamKV, table 3); here RoPE is re-applied to keys unless `rotate=False`
    selects the naive form.

    Cost per prompt: reading the stored keys and values.

    When to use it: where documents do not depend on each other, and to measure what is lost without
    recomputation.
    """

    name: ClassVar[str] = "reuse"
    keeps_all: ClassVar[bool] = True
    rotate: bool = setting(True, "re-apply RoPE to stored keys; False: keep stored positions")

    @property
    def shifts_rope(self) -> bool:
        """As `rotate` says."""
        return self.rotate

    def plan(
        self, documents: Sequence[PlacedDocument], query: Sequence[Tensor] | None
    ) -> RecomputePlan:
        """Everything is kept, nothing is recomputed."""
        shape = len(documents[0].layers), starts(documents)[-1]
        every = torch.ones(shape, dtype=torch.bool)
        return RecomputePlan(every, ~every)

"""Recompute: the whole prompt is computed, ignoring stored documents. The exact reference.

Cost per prompt: a prefill of all documents.

When to use it: for exact answers, and as the reference for the other methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from keyhole.reuse.base import PlacedDocument, RecomputePlan, Reuse, starts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Recompute(Reuse):
    """Recomputes everything, exactly."""

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

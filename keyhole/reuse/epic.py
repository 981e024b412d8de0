"""EPIC: the first tokens of every document are computed again, the rest is used as stored.

Hu et al., EPIC: Efficient Position-Independent Context Caching for Serving Large Language Models,
ICML 2025 (arXiv 2410.15332), section 4. A document encoded alone takes its own first tokens for the
attention sink that only the prompt's first tokens are; computing them again removes that.

Cost per prompt: one forward of `num_initial + num_local` tokens per document over all that is kept,
which is everything.

When to use it: where everything is kept and the cost must not depend on what the documents say.

Differences from the paper: the first document's tokens are computed again too, as a prefix may
stand before it. SamKV compares with a form that computes the last tokens as well: `num_local`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, setting
from keyhole.reuse.base import PlacedDocument, Plan, Reuse, starts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Epic(Reuse):
    """The ends of every document are computed again."""

    name: ClassVar[str] = "epic"
    keeps_all: ClassVar[bool] = True
    num_initial: int = setting(32, "first tokens of each document that are computed again")
    num_local: int = setting(0, "last tokens of each document that are computed again")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks the counts."""
        for name in ("num_initial", "num_local"):
            value = getattr(self, name)
            require(is_count(value, 0), name, value, "a whole number of tokens >= 0")
        return self

    def plan(self, documents: Sequence[PlacedDocument], query: Sequence[Tensor] | None) -> Plan:
        """Everything is kept; the ends are computed again in all layers."""
        edges = starts(documents)
        again = torch.zeros(edges[-1], dtype=torch.bool)
        for start, end in pairwise(edges):
            again[start : min(end, start + self.num_initial)] = True
            again[max(start, end - self.num_local) : end] = True
        written = again.repeat(len(documents[0].layers), 1)
        return Plan(torch.ones_like(written), written)

"""EPIC: the first tokens of every document are recomputed, the rest is used as stored.

Hu et al., EPIC: Efficient Position-Independent Context Caching for Serving Large Language Models,
ICML 2025 (arXiv 2410.15332), section 4. A document encoded alone uses its own first tokens as
attention sinks, which only the prompt's first tokens should be; recomputing them removes that.

Cost per prompt: one forward of `num_initial + num_local` tokens per document over all that is kept,
which is everything.

When to use it: where everything is kept and the cost must not depend on the documents' content.

Differences (theirs | ours | effect measured):
- the first document is not recomputed, as it is at the beginning | its first tokens are recomputed
  too, as a prefix may precede it | not measured: every prompt here has a prefix
- up to 32 first tokens of a document | `num_initial`, 32 by default | 32: 37.5 % (25.2 to 51.6);
  16: 27.1 % (16.6 to 41.0); 8: 4.2 % (1.2 to 14.0); 2: 2.1 % (0.4 to 10.9)
- first tokens only; SamKV compares with a form that also recomputes the last ones | `num_local`, 0
  by default | 32 first and 32 last: 66.7 % (52.5 to 78.3)
- a document keeps the BOS token | documents have none, as they are in the middle of a prompt | with
  it 37.5 % (25.2 to 51.6), the same; median error .028 against .034
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from keyhole.cache.layout import Geometry
from keyhole.config import require_counts, setting
from keyhole.reuse.base import PlacedDocument, RecomputePlan, Reuse, starts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Epic(Reuse):
    """The ends of every document are recomputed."""

    name: ClassVar[str] = "epic"
    keeps_all: ClassVar[bool] = True
    num_initial: int = setting(32, "first tokens of each document that are recomputed")
    num_local: int = setting(0, "last tokens of each document that are recomputed")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks the counts."""
        require_counts(self, "num_initial", "num_local", least=0)
        return self

    def plan(
        self, documents: Sequence[PlacedDocument], query: Sequence[Tensor] | None
    ) -> RecomputePlan:
        """Everything is kept; the ends are recomputed in all layers."""
        edges = starts(documents)
        again = torch.zeros(edges[-1], dtype=torch.bool)
        for start, end in pairwise(edges):
            again[start : min(end, start + self.num_initial)] = True
            again[max(start, end - self.num_local) : end] = True
        recomputed = again.repeat(len(documents[0].layers), 1)
        return RecomputePlan(torch.ones_like(recomputed), recomputed)

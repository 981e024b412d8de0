"""Multi-InfLLM: all documents form one context, of which each layer keeps the first, the last and
the highest-scoring blocks between them. Nothing is recomputed.

Xiao et al., InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context
Memory, NeurIPS 2024 (arXiv 2402.04617), section 3, over concatenated documents the baseline of
SamKV (arXiv 2508.11661, section 4.1).

Cost per prompt: the question once more over the first and last blocks, and a product per block and
layer.

When to use it: as the baseline of SamKV that selects blocks and recomputes nothing.

Differences (theirs | ours | effect measured):
- InfLLM selects again at every chunk and decoded token | once, with the mean over the question's
  tokens when it is read over the first and last blocks: SamKV's generic query | not measured: a
  prompt over stored documents is assembled once
- four representative tokens in a block | one, the token that receives most attention | one: 33.3 %
  (21.7 to 47.5); four: 29.2 % (18.2 to 43.2)
- distant keys share one relative position | true positions | four representatives at one distance:
  37.5 % (25.2 to 51.6)
- blocks run through the whole context | they end with their document | not measured: all documents
  here have whole blocks
- SamKV's paper gives it its own budget | `num_blocks` per document; the tables at equal
  budgets keep as many tokens as SamKV | [both are shown](samkv.md#at-equal-budgets)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from keyhole.cache.layout import Geometry
from keyhole.config import is_number, require, require_counts, setting
from keyhole.reuse.base import PlacedDocument, RecomputePlan, Reuse
from keyhole.reuse.block_scores import Blocks, best, fitting, key_scores, moved

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MultiInfLLM(Reuse):
    """The ends of the whole context, and the blocks between whose representatives score best."""

    name: ClassVar[str] = "multi_infllm"
    reads_facts: ClassVar[bool] = True
    num_initial_blocks: int = setting(1, "first blocks of the whole context, always kept")
    num_local_blocks: int = setting(2, "last blocks of the whole context, always kept")
    num_blocks: int = setting(8, "blocks between them that each layer keeps")
    sequence_ratio: float | None = setting(
        None,
        "share of all tokens to keep, first and last blocks included, instead of num_blocks; "
        "None: num_blocks",
    )

    def resolve(self, geometry: Geometry) -> Self:
        """Checks the counts."""
        require_counts(self, "num_initial_blocks", "num_local_blocks", "num_blocks", least=0)
        ratio = self.sequence_ratio
        good = ratio is None or (is_number(ratio) and 0 < ratio <= 1)
        require(good, "sequence_ratio", ratio, "above 0 and at most 1")
        kept = self.num_initial_blocks + self.num_local_blocks + self.num_blocks
        right = "at least 1 together with num_initial_blocks and num_local_blocks"
        require(kept > 0, "num_blocks", self.num_blocks, right)
        return self

    def question_context(self, documents: Sequence[PlacedDocument]) -> Tensor | None:
        """The first and last blocks; None if no block is selected between them."""
        blocks = Blocks.of(documents)
        ends = self._ends(blocks)
        return None if self._takes_all(blocks, ends) else blocks.tokens(ends)

    def plan(
        self, documents: Sequence[PlacedDocument], query: Sequence[Tensor] | None
    ) -> RecomputePlan:
        """First and last blocks, and the best between; ties go to the earlier."""
        blocks = Blocks.of(documents)
        ends = self._ends(blocks)
        kept = ends.repeat(len(documents[0].layers), 1)
        if self._takes_all(blocks, ends):
            kept[:] = True
        else:
            assert query is not None, "the question is read over the question_context first"
            scores = [_scores(documents, layer, own.cpu()) for layer, own in enumerate(query)]
            kept[:, ~ends] = self._best(torch.stack(scores)[:, ~ends], blocks, ends)
        tokens = blocks.tokens(kept)
        return RecomputePlan(tokens, torch.zeros_like(tokens))

    def _ends(self, blocks: Blocks) -> Tensor:
        """The first and last blocks of all documents together, bool [M]."""
        place = torch.arange(len(blocks.sizes))
        late = place >= len(place) - self.num_local_blocks
        return late | (place < self.num_initial_blocks)

    def _takes_all(self, blocks: Blocks, ends: Tensor) -> bool:
        if self.sequence_ratio is None:
            return int((~ends).sum()) <= self.num_blocks
        return int(blocks.sizes[~ends].sum()) <= self._room(blocks, ends)

    def _best(self, scores: Tensor, blocks: Blocks, ends: Tensor) -> Tensor:
        """The blocks between the ends that each layer keeps, bool [L, m]; scores [L, m]."""
        if self.sequence_ratio is None:
            return best(scores, self.num_blocks)
        return fitting(scores, blocks.sizes[~ends], self._room(blocks, ends))

    def _room(self, blocks: Blocks, ends: Tensor) -> int:
        """Tokens that `sequence_ratio` leaves for the blocks between the ends."""
        assert self.sequence_ratio is not None
        whole = round(self.sequence_ratio * int(blocks.sizes.sum()))
        return max(0, whole - int(blocks.sizes[ends].sum()))


def _scores(documents: Sequence[PlacedDocument], layer: int, query: Tensor) -> Tensor:
    """<query, representative key> of every block, float32 [M]; query [Hq, D]."""
    queries = moved(documents, layer, query.expand(len(documents), -1, -1), back=True)
    return key_scores(queries, [own.layers[layer].representative_keys for own in documents])

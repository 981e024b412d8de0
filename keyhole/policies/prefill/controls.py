"""Controls of prefill policies: as many blocks as XAttention reads, but others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from keyhole.config import is_count, require, setting
from keyhole.kernels import Selection
from keyhole.policies.controls import hashed
from keyhole.policies.prefill.base import PromptChunk
from keyhole.policies.prefill.xattention import NEWEST, XAttention

if TYPE_CHECKING:
    from torch import Tensor


class _SameNumber(XAttention):
    """The first block, the newest two, and others of highest rank; as many as XAttention reads."""

    def select(self, layer: int, chunk: PromptChunk) -> Selection:
        """For every block of queries and head the number of blocks that XAttention selects."""
        counts = super().select(layer, chunk).counts
        scores = self.scores(chunk)
        visible = self.visible(chunk, scores)[:, None, None]
        block = scores.new_ones(scores.shape[2]).cumsum(0) - 1
        ranks = self.ranks(layer, chunk, scores)
        always = (block == 0) | (block >= visible - NEWEST)
        ranks = ranks.masked_fill(always, float("inf"))
        ranks = ranks.masked_fill(block >= visible, float("-inf"))
        place = ranks.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
        indices = block.expand_as(ranks).masked_fill(place >= counts[..., None], float("inf"))
        indices = indices.sort(2).values
        indices = indices.masked_fill(indices.isinf(), -1).int()
        return Selection(indices, counts, self.block_size)

    def ranks(self, layer: int, chunk: PromptChunk, scores: Tensor) -> Tensor:
        """What the blocks are sorted by, float32 as the scores [R, Hq, C]."""
        raise AssertionError(f"{type(self).__name__} must define ranks")


@dataclass(frozen=True, kw_only=True)
class RecentBlocks(_SameNumber):
    """The newest blocks, as many as XAttention reads, and the first; a control, not a method."""

    name: ClassVar[str] = "recent_blocks"

    def ranks(self, layer: int, chunk: PromptChunk, scores: Tensor) -> Tensor:
        """Later blocks first."""
        return scores.new_ones(scores.shape).cumsum(2)


@dataclass(frozen=True, kw_only=True)
class RandomBlocks(_SameNumber):
    """Random blocks, as many as XAttention reads, with the first and the newest; a control."""

    name: ClassVar[str] = "random_blocks"
    seed: int = setting(0, "of the draw")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(is_count(self.seed, 0), "seed", self.seed, "a number from 0")

    def ranks(self, layer: int, chunk: PromptChunk, scores: Tensor) -> Tensor:
        """Numbers drawn anew for each layer, block of queries and head."""
        visible = self.visible(chunk, scores)
        return hashed(self.seed, layer, visible, scores.shape[1], scores.shape[2])

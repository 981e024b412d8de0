"""XAttention: blocks of keys whose antidiagonals hold a share of the attention.

Xu et al., XAttention: Block Sparse Attention with Antidiagonal Scoring, ICML 2025
(arXiv 2503.16428), section 2.1, algorithm 1 and section 2.2 (threshold block selection).

Attention of a long prompt falls on few blocks. In every square of `stride` queries by `stride` keys
the products along the antidiagonal are summed: it crosses every vertical and every slanted line of
the square, so it notices both patterns. A softmax over the sums of a row of squares estimates the
weight of each square, and the weights in a block of `block_size` queries by `block_size` keys are
added up. A block of queries then reads the fewest blocks of keys that hold the share `mass` of its
weight.

Cost per chunk and layer: q . k for one of `stride` pairs, all keys once, and the attention of the
selected blocks.

When to use it: for prompts of many thousand tokens, where attention takes most of the time.

Differences from the paper: the first block and the block on the diagonal are always read and count
towards the mass, as in the authors' code; the paper's rule alone could leave out a token's own
block. So is the block before the diagonal: in heads that attend to the token before, nearly all the
weight of a block of queries is on its own keys, and the rule left out the one key that the first
query of the block needs (benchmarks/LOG.md). There is one threshold for all heads (the paper's
minimum threshold per head needs a search over calibration data). Prompts are computed in chunks:
the rows of a chunk that begins or ends inside a block select by themselves, and squares cut by the
end of a chunk use the mean of the products that exist. Soft-capped models cap the mean product;
sinks that are not keys are left out of the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from keyhole import kernels
from keyhole.config import is_number, require, require_counts, setting
from keyhole.kernels import Selection
from keyhole.policies.prefill.base import PrefillPolicy, PromptChunk

if TYPE_CHECKING:
    from torch import Tensor


#: Newest blocks that are always read: the own one, and the one before it.
NEWEST = 2


@dataclass(frozen=True, kw_only=True)
class XAttention(PrefillPolicy):
    """Blocks whose antidiagonal sums hold a share of the attention."""

    name: ClassVar[str] = "xattention"
    mass: float = setting(
        0.95, "the share of its estimated attention that a block of queries keeps"
    )
    stride: int = setting(8, "of this many queries and keys, one pair each is scored")

    def __post_init__(self) -> None:
        super().__post_init__()
        right = "above 0 and at most 1, which reads everything"
        require(is_number(self.mass) and 0 < self.mass <= 1, "mass", self.mass, right)
        require_counts(self, "stride")
        right = f"a divisor of block_size {self.block_size}"
        require(self.block_size % self.stride == 0, "stride", self.stride, right)

    def select(self, layer: int, chunk: PromptChunk) -> Selection:
        """The fewest blocks that hold `mass`."""
        scores = self.scores(chunk)
        visible = self.visible(chunk, scores)
        everything = kernels.top_k(scores, visible, scores.shape[2], self.block_size, last=1)
        if self.mass == 1.0:  # the sum of rounded scores could leave out a block
            return everything
        return kernels.top_p(everything, scores, visible, self.mass, first=1, last=NEWEST)

    def scores(self, chunk: PromptChunk) -> Tensor:
        """The estimated weight of every block of keys, float32 [R, Hq, C]."""
        return kernels.antidiagonal_scores(
            chunk.query,
            chunk.key_pages,
            chunk.pages,
            chunk.start,
            block_size=self.block_size,
            stride=self.stride,
            scale=chunk.scale,
            softcap=chunk.softcap,
        )

    def visible(self, chunk: PromptChunk, scores: Tensor) -> Tensor:
        """The blocks up to its own that each block of queries may read, int32 [R]."""
        own = chunk.start // self.block_size
        return scores.new_ones(len(scores)).cumsum(0).add(own).int()

"""Controls that methods are compared with: full attention, recency, random tokens, an oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, require_counts, require_layers_of, setting
from keyhole.policies.base import Policy, ScoreRequest, Selection, Selects, Step, always_read

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Dense attention.

    Full attention: every step reads every key and value. The baseline of all others.

    Cost per step and layer: the whole cache of a sequence.

    When to use it: where memory and speed allow it, and as the reference for every other method.
    """

    name: ClassVar[str] = "full"
    selects: ClassVar[Selects | None] = "per_layer"
    dense: ClassVar[bool] = True
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = True

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """Everything."""
        return None


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Policy):
    """The last `token_budget` tokens.

    Sliding window: a step reads the newest tokens and nothing else.

    The simplest bound on the tokens that a step reads (Longformer, Beltagy et al., arXiv
    2004.05150, section 3.1, used here at decode time only). Tokens outside the window stay in the
    cache but are not read.

    Cost per step and layer: `token_budget` keys and values.

    When to use it: where only recent tokens matter; older tokens are never read.
    """

    name: ClassVar[str] = "sliding_window"
    selects: ClassVar[Selects | None] = "per_layer"
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = True
    token_budget: int = setting(1024, "tokens a step reads per KV head: the window")
    full_layers: tuple[int, ...] = setting((), "layers that read everything")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks the budget."""
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        require_counts(self, "token_budget")
        return self

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The newest tokens, the same for all heads."""
        if layer in self.full_layers or self._reads_all(step):
            return None
        return kernels.recent_indices(step.lengths, self.token_budget)


@dataclass(frozen=True, kw_only=True)
class RandomTokens(Policy):
    """`token_budget` tokens drawn at random, per KV head; a control, not a method.

    Random tokens: the control that selects at random.

    Not a published method. A method that is no better than this, at the same dense layers and the
    same number of tokens, has no useful selection. The newest token is always read. A token's score
    is a hash of the seed, the layer, the KV head, the length of the sequence and the token's
    position, so that every step and layer draws independently and runs are reproducible.

    Cost per step and layer: `token_budget` keys and values.
    """

    name: ClassVar[str] = "random"
    selects: ClassVar[Selects | None] = "per_layer"
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = True
    token_budget: int = setting(1024, "tokens a step reads per KV head, the newest among them")
    sink_size: int = setting(0, "first tokens that are always read")
    full_layers: tuple[int, ...] = setting((), "layers that read everything")
    seed: int = setting(0, "of the draw")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks that the newest token fits in addition to the sinks."""
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        require(is_count(self.seed, 0), "seed", self.seed, "a number from 0")
        always_read(self.sink_size, None, self.token_budget)
        return self

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """Sinks, the newest token, and random others, per KV head."""
        if layer in self.full_layers or self._reads_all(step):
            return None
        tokens = step.page_table.shape[1] * step.page_size
        scores = hashed(self.seed, layer, step.lengths, step.cache.keys[layer].shape[1], tokens)
        if step.kept_tokens is not None:  # a token that the layer lacks is not drawn
            there = step.kept_tokens.pages(layer, step.page_table.shape[1], step.page_size)
            there = there.repeat_interleave(step.page_size, 1)
            scores = scores.masked_fill(~there[:, None], float("-inf"))
        return kernels.top_k(
            scores, step.lengths, self.token_budget, 1, first=self.sink_size, last=1
        )


#: Odd multipliers whose bits look random (golden ratio and primes of xxHash), one for each input.
_SEED, _LAYER, _LENGTH, _HEAD, _TOKEN = 2654435761, 2246822519, 3266489917, 668265263, 374761393


def hashed(seed: int, layer: int, lengths: Tensor, num_heads: int, num_tokens: int) -> Tensor:
    """A number from 0 to below 1 for every token of every KV head, float32 [B, Hkv, N]."""
    mask, long = 0xFFFFFFFF, lengths.long()
    head = long.new_ones(num_heads).cumsum(0)[:, None] * _HEAD
    token = long.new_ones(num_tokens).cumsum(0) * _TOKEN
    start = (seed * _SEED + layer * _LAYER) & mask
    mixed = (long[:, None, None] * _LENGTH + head + token + start) & mask
    for shift, factor in ((15, _LAYER), (13, _LENGTH)):  # xxHash's avalanche
        mixed = ((mixed ^ (mixed >> shift)) * factor) & mask
    mixed = mixed ^ (mixed >> 16)
    # 24 bits are exact in float32.
    return (mixed >> 8).float() / 2**24


@dataclass(frozen=True, kw_only=True)
class Oracle(Policy):
    """The `token_budget` tokens of largest true attention weight, per KV head; a control.

    Oracle: the tokens of largest true attention weight in this layer at this step.

    Not a published method, and it saves nothing: every layer computes all its attention weights,
    keeps the `token_budget` tokens of largest weight per KV head (the largest among the query heads
    of the group, the newest token always) and attends to these alone. It bounds the quality of any
    selection of that many tokens.

    Cost per step and layer: all keys and values once for the weights, then `token_budget` again.
    The keys read for the selection are not counted, as no real method could select this way.
    """

    name: ClassVar[str] = "oracle"
    selects: ClassVar[Selects | None] = "per_layer"
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = True
    token_budget: int = setting(1024, "tokens a step reads per KV head, the newest among them")
    full_layers: tuple[int, ...] = setting((), "layers that read everything")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks the budget."""
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        require_counts(self, "token_budget")
        return self

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """None: a layer's weights need all its keys."""
        return ()

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """The weights of every token, the largest of each group of heads."""
        if layer in self.full_layers or self._reads_all(step):
            return ()
        return (ScoreRequest("group_max", 1),)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> Selection | None:
        """Selects for this layer alone."""
        return kernels.top_k(scores[0], step.lengths, self.token_budget, 1, last=1)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """Everything: full layers, and all within the budget."""
        return None

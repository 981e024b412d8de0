"""What a reuse method is: frozen settings and a few pure functions over stored documents.

A prompt is a prefix, documents that were encoded alone and stored, and a question. A method says
which stored tokens of which layer the prompt keeps, and which of those are computed again at their
places. It sees small facts of every document (block means, queries, statistics), never the keys and
values themselves: the engine reads those, and only what is kept.

Token space: all tokens of all documents in a row, T of them; document i owns
`starts[i] : starts[i] + length`. Layers are the model's, L of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from keyhole.cache.layout import Geometry
from keyhole.config import settle_types, short_repr

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LayerFacts", "PlacedDocument", "RecomputePlan", "Reuse", "starts"]


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """What one layer knows of a document's blocks; keys and queries stand at the prompt's places.

    Everything that a method is given of documents lies on the CPU, and so does what it gives back.

    block_keys: float32 [N, Hkv, D], mean key of each block.
    block_queries: float32 [N, Hq, D], mean query of each block.
    representatives: int64 [N], the token (from 0 in the document) that stands for the block.
    representative_keys: float32 [N, Hkv, D], its key.
    alpha: float32 [N], how fast the attention that it receives decays; less is more important.
    received: float32 [N], the mean attention that it receives.
    """

    block_keys: Tensor
    block_queries: Tensor
    representatives: Tensor
    representative_keys: Tensor
    alpha: Tensor
    received: Tensor


@dataclass(frozen=True, eq=False)
class PlacedDocument:
    """A stored document at its place in a prompt.

    length: tokens. offset: position of its first token in the prompt. block_size: tokens per block;
    the last block may be shorter. extremes: per layer float32 [N, k, Hkv, D], of each block and
    head the keys that lie farthest from their mean; turned anew whenever they are asked for, which
    only methods do that say so (`Reuse.extremes`).
    """

    name: str
    length: int
    offset: int
    block_size: int
    layers: Sequence[LayerFacts]
    extremes: Sequence[Tensor] = ()

    @property
    def num_blocks(self) -> int:
        """N, the short last one included."""
        return -(-self.length // self.block_size)


@dataclass(frozen=True, eq=False)
class RecomputePlan:
    """What a prompt keeps of its documents, and what of that is computed again.

    kept: bool [L, T]. written: bool [L, T], within `kept`: tokens whose keys and values of that
    layer are computed again. Every token written anywhere runs through all layers; where it is not
    written it uses what is stored, and where it is not kept it leaves no trace.
    shares: per document the share of middle blocks that the method wanted (SamKV's P); None where
    a method has no such number.
    """

    kept: Tensor
    written: Tensor
    shares: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """What a prompt keeps and computes again of stored documents. Subclass it, set `name`."""

    name: ClassVar[str]
    #: True if the prompt is computed like any other, without what is stored.
    exact: ClassVar[bool] = False
    #: True if every layer has all tokens of all documents afterwards.
    keeps_all: ClassVar[bool] = False
    #: True if `plan` looks at the facts of all layers, which are read layer by layer before it.
    reads_facts: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):  # else @dataclass makes a longer one
            cls.__repr__ = short_repr  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        settle_types(self)

    @property
    def turns(self) -> bool:
        """Whether RoPE is re-applied to stored keys at their prompt positions (False: naive)."""
        return True

    @property
    def check_layer(self) -> int | None:
        """Layer up to which everything is computed before `revise` chooses; None: no such layer."""
        return None

    @property
    def extremes(self) -> bool:
        """Whether `plan` compares documents' extremes with the query of each token of the question.

        Then documents must be stored with them, and it is given these queries, not their mean.
        """
        return False

    def resolve(self, geometry: Geometry) -> Self:
        """This method with every "auto" value settled for a model.

        Raises ConfigError for settings that this model cannot have.
        """
        return self

    def glance(self, documents: Sequence[PlacedDocument]) -> Tensor | None:
        """Tokens, bool [T], over which the question is read first to get its query; None: no."""
        return None

    def plan(
        self, documents: Sequence[PlacedDocument], query: Sequence[Tensor] | None
    ) -> RecomputePlan:
        """What to keep and what to compute again.

        query: per layer float32 [Hq, D], mean over the question's tokens of its rotated queries
        when it was read over `glance`, or with `extremes` [t, Hq, D], of each of its tokens; None
        if there was no glance.
        """
        raise AssertionError(f"{type(self).__name__} must define plan")

    def revise(
        self, documents: Sequence[PlacedDocument], plan: RecomputePlan, deviation: Tensor
    ) -> RecomputePlan:
        """What is still to be computed once `check_layer` is; called only if there is one.

        deviation: float32 [2, T], |new - stored|^2 in that layer of keys and of values, summed over
        heads and numbers. What was computed up to that layer stays there, whatever the new
        `written` says of those layers; it names the tokens that go on.
        """
        return plan

    @property
    def fuses(self) -> bool:
        """Whether `blend` needs what is stored; if not, that is not read from the store."""
        return False

    def blend(self, new: Tensor, old: Tensor) -> Tensor:
        """What stands in the end for tokens computed again; new, old [n, Hkv, D] (or Dv).

        Keys and values are blended apart. Gives new's shape and dtype.
        """
        return new


def starts(documents: Sequence[PlacedDocument]) -> list[int]:
    """Where each document begins in the token space, and at the end T."""
    edges = [0]
    for document in documents:
        edges.append(edges[-1] + document.length)
    return edges

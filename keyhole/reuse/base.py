"""The interface of reuse methods: frozen settings and pure functions over stored documents.

A prompt is a prefix, documents that were encoded alone and stored, and a question. A method decides
which stored tokens each layer keeps, and which of those are recomputed at their positions. It reads
small statistics of every document (block means, queries), never all keys and values: the engine
reads those, for kept tokens only.

Token space: all tokens of all documents in a row, T of them; document i owns
`starts[i] : starts[i] + length`. Layers are the model's, L of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole.cache.layout import Geometry
from keyhole.config import MethodSettings

if TYPE_CHECKING:
    from torch import Tensor

    from keyhole.documents.record import LayerStatistics

__all__ = ["PlacedDocument", "RecomputePlan", "Reuse", "Shift", "starts"]


#: Rotates keys or queries [..., D] of a layer, in any position, by int64 that broadcasts against
#: all dimensions but the last: shift(layer, x, by).
Shift = Callable[[int, "Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True, eq=False)
class PlacedDocument:
    """A stored document at its position in a prompt. A method's inputs and results are on the CPU.

    length: tokens. offset: position of its first token in the prompt. block_size: tokens per block;
    the last block may be shorter. layers: its statistics, whose keys and queries are rotated as if
    the document began at position 0. extremes: per layer [N, k, Hkv, D], of each block and head the
    keys farthest from their mean, rotated alike; read by methods with `Reuse.extremes` only. shift:
    the model's rotation, by which queries are moved (`block_scores.moved`); None: keys are used at
    the positions where they are stored.
    """

    name: str
    length: int
    offset: int
    block_size: int
    layers: Sequence[LayerStatistics]
    extremes: Sequence[Tensor] = ()
    shift: Shift | None = None

    @property
    def num_blocks(self) -> int:
        """N, the short last one included."""
        return -(-self.length // self.block_size)


@dataclass(frozen=True, eq=False)
class RecomputePlan:
    """The tokens that a prompt keeps of its documents, and the ones recomputed.

    kept: bool [L, T]. recomputed: bool [L, T], within `kept`: tokens whose keys and values are
    recomputed in that layer. A token that is recomputed in any layer runs through all layers; in
    the others it uses the stored keys and values, and where it is not kept it writes nothing.
    shares: per document the share of middle blocks that the method wanted (SamKV's P); None where
    a method has no such number.
    """

    kept: Tensor
    recomputed: Tensor
    shares: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Reuse(MethodSettings):
    """Decides which stored tokens a prompt keeps and recomputes. Subclass it, set `name`."""

    name: ClassVar[str]
    #: True if the prompt is computed like any other, without stored keys and values.
    exact: ClassVar[bool] = False
    #: True if every layer has all tokens of all documents afterwards.
    keeps_all: ClassVar[bool] = False
    #: True if `plan` looks at the statistics of all layers.
    reads_facts: ClassVar[bool] = False

    @property
    def shifts_rope(self) -> bool:
        """Whether RoPE is re-applied to stored keys at their prompt positions (False: naive)."""
        return True

    @property
    def probe_layer(self) -> int | None:
        """Layer up to which all is recomputed before `revise` selects; None: no such layer."""
        return None

    @property
    def extremes(self) -> bool:
        """Whether `plan` compares documents' extremes with the query of each token of the question.

        Documents must then be stored with extremes, and `plan` receives these queries, not their
        mean.
        """
        return False

    @property
    def document_limit(self) -> int | None:
        """The most documents that are opened: those that match the question best; None: all."""
        return None

    def resolve(self, geometry: Geometry) -> Self:
        """This method with every "auto" value resolved for a model.

        Raises ConfigError for settings that this model cannot have.
        """
        return self

    def question_context(self, documents: Sequence[PlacedDocument]) -> Tensor | None:
        """Tokens, bool [T], over which the question is first read to get its query; None: none."""
        return None

    def plan(
        self, documents: Sequence[PlacedDocument], query: Sequence[Tensor] | None
    ) -> RecomputePlan:
        """The tokens to keep and to recompute.

        query: per layer float32 [Hq, D], the mean of the question's rotated queries when it was
        read over `question_context`, or with `extremes` [t, Hq, D], those of each of its tokens;
        None without a first pass.
        """
        raise AssertionError(f"{type(self).__name__} must define plan")

    def revise(
        self, documents: Sequence[PlacedDocument], plan: RecomputePlan, deviation: Tensor
    ) -> RecomputePlan:
        """The tokens still to be recomputed after `probe_layer`; called only if there is one.

        deviation: float32 [2, T], |new - stored|^2 in that layer of keys and of values, summed over
        heads and numbers. Keys and values computed up to that layer stay, whatever the new
        `recomputed` is there; it names the tokens that continue.
        """
        return plan

    @property
    def fuses(self) -> bool:
        """Whether `fuse` needs the stored keys and values; if not, they are not read."""
        return False

    def fuse(self, new: Tensor, old: Tensor) -> Tensor:
        """The final keys or values of recomputed tokens; new, old [n, Hkv, D] (or Dv).

        Keys and values are blended separately. Returns new's shape and dtype.
        """
        return new


def starts(documents: Sequence[PlacedDocument]) -> list[int]:
    """Where each document begins in the token space, and at the end T."""
    edges = [0]
    for document in documents:
        edges.append(edges[-1] + document.length)
    return edges


def rounded_up(share: float, number: int) -> int:
    """`share` of `number`, rounded up; 0.07 of 100 is 7, though their product in floats is more."""
    return math.ceil(round(share * number, 9))

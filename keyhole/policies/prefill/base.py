"""The interface of prefill policies: which blocks of keys the tokens of a long prompt read.

Like a policy, a prefill policy is frozen settings and pure functions. It is called for every prompt
chunk and every layer with full attention; layers with a window of their own, stored documents and
decode steps never call it. Positions are cut into blocks of `block_size` tokens. The queries of a
block share one selection for each query head.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole.cache.layout import Geometry
from keyhole.config import MethodSettings, require_counts, setting
from keyhole.errors import ConfigError
from keyhole.kernels import Selection
from keyhole.registry import written

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PromptChunk:
    """Consecutive tokens of one prompt in one layer.

    query: [T, Hq, D], rotated as the keys are, of the tokens from `start`. key_pages: [P, Hkv,
    page_size, D], these tokens included; pages: int64 [M], those of the sequence in order. scale,
    softcap: as in `kernels.prefill`.
    """

    query: Tensor
    key_pages: Tensor
    pages: Tensor
    start: int
    scale: float
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillPolicy(MethodSettings):
    """Selects what the tokens of a prompt read. Subclass it, set `name`, define `select`."""

    name: ClassVar[str]
    block_size: int = setting(128, "tokens in a block of queries or keys")
    min_length: int = setting(
        4096, "prompt tokens up to this position, which read everything before them"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, "block_size")
        require_counts(self, "min_length", least=0)

    @property
    def text(self) -> str:
        """Name and settings as `LLM(prefill_policy=...)` takes them."""
        return written(
            self.name, ((one.name, str(getattr(self, one.name))) for one in fields(self))
        )

    def resolve(self, geometry: Geometry) -> Self:
        """This policy for a model. ConfigError for a model without a layer that it applies to."""
        if not geometry.full_attention:
            raise ConfigError(
                f"prefill_policy {self.name!r} selects in layers with full attention, and every "
                "layer of this model has a window or an indexer of its own; leave it out"
            )
        return self

    def is_dense(self, start: int, count: int) -> bool:
        """Whether `count` tokens from `start` read everything: they end early, or are few.

        Fewer than a block are mostly the end of a prompt, which asks the question, and save little.
        """
        return start + count <= self.min_length or count < self.block_size

    def causal_blocks(self, start: int, count: int) -> int:
        """Pairs of a block of these queries and a block of keys not after it."""
        first, end = start // self.block_size, -(-(start + count) // self.block_size)
        return sum(range(first + 1, end + 1))

    def select(self, layer: int, chunk: PromptChunk) -> Selection:
        """The blocks of keys that each block of queries reads, as `kernels.block_sparse_prefill`.

        Its own block is always among them.
        """
        raise AssertionError(f"{type(self).__name__} must define select")

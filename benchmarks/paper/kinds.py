"""Settings of the kinds of benchmark that only the papers' settings have."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.bench.settings import DTYPES, PAGE_SIZE, SHAPES, DecodeSettings, Names, require_known
from keyhole.config import is_count, require

#: Policies of whole answers whose layers are offloaded as their texts grow.
OFFLOADED_SYSTEMS = {"spe_context_below": "spe_context"}


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings:
    """Whole answers by the decode benchmark; `benchmarks.paper.settings` names such settings.

    prompt, answer: tokens of every text. memory: bytes that requests are counted for. host_memory:
    bytes that offloaded layers may take, of the systems in OFFLOADED_SYSTEMS. points: how many
    lengths along the answer are measured. decode: the rest; its contexts and batch are not used.
    """

    prompt: int
    answer: int
    memory: int
    host_memory: int = 32 << 30
    points: int = 4
    decode: DecodeSettings

    def __post_init__(self) -> None:
        for name in ("prompt", "memory", "host_memory"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "at least 1")
        require(is_count(self.points, 2), "points", self.points, "at least 2")
        least = (self.points - 1) * PAGE_SIZE
        right = f"at least {least}: a page between any two points"
        require(is_count(self.answer, least), "answer", self.answer, right)


@dataclass(frozen=True, kw_only=True)
class DocumentSettings:
    """Questions over stored documents of random tokens; `benchmarks.paper.settings` names such.

    documents: how many, of `tokens` tokens each; question: tokens after them. methods: of reuse,
    with their defaults, and transformers_sdpa. folder: where documents are stored; None: the
    system's place.
    """

    methods: Names
    documents: int = 16
    tokens: int = 1024
    question: int = 64
    repeat: int = 5
    shape: str = "llama-3.1-8b"
    dtype: str = "bfloat16"
    device: str = "auto"
    folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("documents", "tokens", "question", "repeat"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "at least 1")
        require(bool(self.methods), "methods", self.methods, "at least one")
        require_known("shape", [self.shape], SHAPES)
        require_known("dtype", [self.dtype], DTYPES)

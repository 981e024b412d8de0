"""Settings of the benchmarks that only the papers' headline settings use."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.bench.settings import DTYPES, PAGE_SIZE, SHAPES, DecodeSettings, Names
from keyhole.config import is_count, require, require_known

#: Systems whose layers are offloaded as sequences grow, and their policies.
OFFLOADED_SYSTEMS = {"spe_context_below": "spe_context"}


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings:
    """Throughput of whole answers, measured with the decode benchmark.

    prompt, answer: tokens of every request. memory: bytes that limit the number of requests.
    host_memory: bytes for offloaded layers of the systems in OFFLOADED_SYSTEMS. points: how many
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
class StepSettings:
    """Times of single steps, beside the time that the bytes they read take at full bandwidth.

    decode: what is measured. labels: the names of its contexts.
    """

    labels: Names
    decode: DecodeSettings

    def __post_init__(self) -> None:
        count = len(self.decode.contexts)
        require(len(self.labels) == count, "labels", self.labels, f"{count}, one for each context")


@dataclass(frozen=True, kw_only=True)
class DocumentSettings:
    """Time to first token of questions over stored documents of random tokens.

    documents: how many, of `tokens` tokens each; question: tokens after them. methods: reuse
    methods with their defaults, and transformers_sdpa. hot: those of them that are also measured
    with blocks of documents kept on the device (`hot_document_bytes`), as NAME_hot. folder: where
    documents are stored; None: the system's temporary folder.
    """

    methods: Names
    hot: Names = ()
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
        require_known("shape", self.shape, SHAPES)
        require_known("dtype", self.dtype, DTYPES)

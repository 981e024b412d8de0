"""Keyhole: long contexts with Hugging Face models, reading only the keys and values that matter.

    from keyhole import LLM, Delta
    llm = LLM("tiny", policy=Delta(token_budget=256))
    print(llm.generate("...").text)

Names are loaded on first use: `import keyhole` imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from keyhole.config import SamplingParams
    from keyhole.engine.async_llm import AsyncLLM
    from keyhole.engine.context import Reused
    from keyhole.engine.llm import LLM
    from keyhole.engine.result import Piece, Result
    from keyhole.engine.sequence import Stats
    from keyhole.errors import (
        CapacityError,
        ConfigError,
        KeyholeError,
        ModelError,
        NumericalError,
        PromptTooLongError,
        RequestError,
        UnknownNameError,
    )
    from keyhole.hf.run import SparseRun, SparseStats
    from keyhole.hf.sparse import sparse
    from keyhole.policy import policies
    from keyhole.policy.base import Policy
    from keyhole.policy.clusterkv import ClusterKV
    from keyhole.policy.delta import Delta
    from keyhole.policy.full import Full
    from keyhole.policy.infllm import InfLLM
    from keyhole.policy.omnikv import OmniKV
    from keyhole.policy.quest import Quest
    from keyhole.policy.raas import RaaS
    from keyhole.policy.shadowkv import ShadowKV
    from keyhole.policy.sliding_window import SlidingWindow
    from keyhole.policy.spe_context import SpeContext
    from keyhole.policy.streaming_llm import StreamingLLM
    from keyhole.policy.tidal_decode import TidalDecode
    from keyhole.reuse import reuses
    from keyhole.reuse.base import Reuse
    from keyhole.reuse.cacheblend import CacheBlend
    from keyhole.reuse.epic import Epic
    from keyhole.reuse.multi_infllm import MultiInfLLM
    from keyhole.reuse.plain import PlainReuse
    from keyhole.reuse.recompute import Recompute
    from keyhole.reuse.sam_kv import SamKV

_PLACES = {
    "LLM": "keyhole.engine.llm",
    "AsyncLLM": "keyhole.engine.async_llm",
    "Result": "keyhole.engine.result",
    "Piece": "keyhole.engine.result",
    "Stats": "keyhole.engine.sequence",
    "Reused": "keyhole.engine.context",
    "sparse": "keyhole.hf.sparse",
    "SparseRun": "keyhole.hf.run",
    "SparseStats": "keyhole.hf.run",
    "SamplingParams": "keyhole.config",
    "Policy": "keyhole.policy.base",
    "policies": "keyhole.policy",
    "Full": "keyhole.policy.full",
    "SlidingWindow": "keyhole.policy.sliding_window",
    "StreamingLLM": "keyhole.policy.streaming_llm",
    "Quest": "keyhole.policy.quest",
    "SpeContext": "keyhole.policy.spe_context",
    "Delta": "keyhole.policy.delta",
    "TidalDecode": "keyhole.policy.tidal_decode",
    "OmniKV": "keyhole.policy.omnikv",
    "InfLLM": "keyhole.policy.infllm",
    "RaaS": "keyhole.policy.raas",
    "ClusterKV": "keyhole.policy.clusterkv",
    "ShadowKV": "keyhole.policy.shadowkv",
    "Reuse": "keyhole.reuse.base",
    "reuses": "keyhole.reuse",
    "Recompute": "keyhole.reuse.recompute",
    "PlainReuse": "keyhole.reuse.plain",
    "SamKV": "keyhole.reuse.sam_kv",
    "CacheBlend": "keyhole.reuse.cacheblend",
    "Epic": "keyhole.reuse.epic",
    "MultiInfLLM": "keyhole.reuse.multi_infllm",
    "KeyholeError": "keyhole.errors",
    "ConfigError": "keyhole.errors",
    "UnknownNameError": "keyhole.errors",
    "ModelError": "keyhole.errors",
    "RequestError": "keyhole.errors",
    "PromptTooLongError": "keyhole.errors",
    "CapacityError": "keyhole.errors",
    "NumericalError": "keyhole.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheBlend",
    "CapacityError",
    "ClusterKV",
    "ConfigError",
    "Delta",
    "Epic",
    "Full",
    "InfLLM",
    "KeyholeError",
    "ModelError",
    "MultiInfLLM",
    "NumericalError",
    "OmniKV",
    "Piece",
    "PlainReuse",
    "Policy",
    "PromptTooLongError",
    "Quest",
    "RaaS",
    "Recompute",
    "RequestError",
    "Result",
    "Reuse",
    "Reused",
    "SamKV",
    "SamplingParams",
    "ShadowKV",
    "SlidingWindow",
    "SparseRun",
    "SparseStats",
    "SpeContext",
    "Stats",
    "StreamingLLM",
    "TidalDecode",
    "UnknownNameError",
    "policies",
    "reuses",
    "sparse",
    "tiny",
]


def tiny() -> str:
    """Folder of the bundled model, for other programs; Keyhole knows it as "tiny"."""
    return str(Path(__file__).parent / "models" / "tiny" / "keyhole-tiny")


def _version() -> str:
    metadata = importlib.import_module("importlib.metadata")  # 20 ms that few programs need
    try:
        return str(metadata.version("keyhole"))
    except metadata.PackageNotFoundError:  # a bare copy of the source, not installed
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        globals()[name] = value = _version()
        return value
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

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
    from keyhole.async_llm import AsyncLLM
    from keyhole.config import SamplingParams
    from keyhole.engine.documents.filling import Reused
    from keyhole.engine.sequence import Piece, Result, Stats
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
    from keyhole.hf.hooks import SparseRun, SparseStats
    from keyhole.hf.sparse import sparse
    from keyhole.llm import LLM
    from keyhole.policies import available_policies
    from keyhole.policies.base import Policy
    from keyhole.policies.clusterkv import ClusterKV
    from keyhole.policies.controls import Full, SlidingWindow
    from keyhole.policies.delta import Delta
    from keyhole.policies.evicting.r_kv import RKV
    from keyhole.policies.evicting.raas import RaaS
    from keyhole.policies.evicting.snapkv import SnapKV
    from keyhole.policies.infllm import InfLLM
    from keyhole.policies.omnikv import OmniKV
    from keyhole.policies.quest import Quest
    from keyhole.policies.seer_attention_r import SeerAttentionR
    from keyhole.policies.shadowkv import ShadowKV
    from keyhole.policies.spe_context import SpeContext
    from keyhole.policies.streaming_llm import StreamingLLM
    from keyhole.policies.tidal_decode import TidalDecode
    from keyhole.reuse import available_reuse_methods
    from keyhole.reuse.base import Reuse
    from keyhole.reuse.baselines import FullReuse, Recompute
    from keyhole.reuse.cacheblend import CacheBlend
    from keyhole.reuse.epic import Epic
    from keyhole.reuse.multi_infllm import MultiInfLLM
    from keyhole.reuse.sam_kv import SamKV

_PLACES = {
    "LLM": "keyhole.llm",
    "AsyncLLM": "keyhole.async_llm",
    "Result": "keyhole.engine.sequence",
    "Piece": "keyhole.engine.sequence",
    "Stats": "keyhole.engine.sequence",
    "Reused": "keyhole.engine.documents.filling",
    "sparse": "keyhole.hf.sparse",
    "SparseRun": "keyhole.hf.hooks",
    "SparseStats": "keyhole.hf.hooks",
    "SamplingParams": "keyhole.config",
    "Policy": "keyhole.policies.base",
    "available_policies": "keyhole.policies",
    "Full": "keyhole.policies.controls",
    "SlidingWindow": "keyhole.policies.controls",
    "StreamingLLM": "keyhole.policies.streaming_llm",
    "Quest": "keyhole.policies.quest",
    "SpeContext": "keyhole.policies.spe_context",
    "Delta": "keyhole.policies.delta",
    "TidalDecode": "keyhole.policies.tidal_decode",
    "OmniKV": "keyhole.policies.omnikv",
    "InfLLM": "keyhole.policies.infllm",
    "RaaS": "keyhole.policies.evicting.raas",
    "RKV": "keyhole.policies.evicting.r_kv",
    "SnapKV": "keyhole.policies.evicting.snapkv",
    "ClusterKV": "keyhole.policies.clusterkv",
    "ShadowKV": "keyhole.policies.shadowkv",
    "SeerAttentionR": "keyhole.policies.seer_attention_r",
    "Reuse": "keyhole.reuse.base",
    "available_reuse_methods": "keyhole.reuse",
    "Recompute": "keyhole.reuse.baselines",
    "FullReuse": "keyhole.reuse.baselines",
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
    "RKV",
    "AsyncLLM",
    "CacheBlend",
    "CapacityError",
    "ClusterKV",
    "ConfigError",
    "Delta",
    "Epic",
    "Full",
    "FullReuse",
    "InfLLM",
    "KeyholeError",
    "ModelError",
    "MultiInfLLM",
    "NumericalError",
    "OmniKV",
    "Piece",
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
    "SeerAttentionR",
    "ShadowKV",
    "SlidingWindow",
    "SnapKV",
    "SparseRun",
    "SparseStats",
    "SpeContext",
    "Stats",
    "StreamingLLM",
    "TidalDecode",
    "UnknownNameError",
    "available_policies",
    "available_reuse_methods",
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

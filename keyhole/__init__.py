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
    from keyhole.async_llm import AsyncLLM as AsyncLLM
    from keyhole.config import SamplingParams as SamplingParams
    from keyhole.engine.documents.filling import Reused as Reused
    from keyhole.engine.sequence import (
        Piece as Piece,
        Result as Result,
        Stats as Stats,
    )
    from keyhole.errors import (
        CapacityError as CapacityError,
        ConfigError as ConfigError,
        KeyholeError as KeyholeError,
        ModelError as ModelError,
        NumericalError as NumericalError,
        PromptTooLongError as PromptTooLongError,
        RequestError as RequestError,
        UnknownNameError as UnknownNameError,
    )
    from keyhole.hf.hooks import (
        SparseRun as SparseRun,
        SparseStats as SparseStats,
    )
    from keyhole.hf.sparse import sparse as sparse
    from keyhole.llm import LLM as LLM
    from keyhole.policies import available_policies as available_policies
    from keyhole.policies.base import Policy as Policy
    from keyhole.policies.clusterkv import ClusterKV as ClusterKV
    from keyhole.policies.controls import (
        Full as Full,
        SlidingWindow as SlidingWindow,
    )
    from keyhole.policies.delta import Delta as Delta
    from keyhole.policies.evicting.r_kv import RKV as RKV
    from keyhole.policies.evicting.raas import RaaS as RaaS
    from keyhole.policies.evicting.snapkv import SnapKV as SnapKV
    from keyhole.policies.infllm import InfLLM as InfLLM
    from keyhole.policies.omnikv import OmniKV as OmniKV
    from keyhole.policies.quest import Quest as Quest
    from keyhole.policies.seer_attention_r import SeerAttentionR as SeerAttentionR
    from keyhole.policies.shadowkv import ShadowKV as ShadowKV
    from keyhole.policies.spe_context import SpeContext as SpeContext
    from keyhole.policies.streaming_llm import StreamingLLM as StreamingLLM
    from keyhole.policies.tidal_decode import TidalDecode as TidalDecode
    from keyhole.reuse import available_reuse_methods as available_reuse_methods
    from keyhole.reuse.base import Reuse as Reuse
    from keyhole.reuse.baselines import (
        FullReuse as FullReuse,
        Recompute as Recompute,
    )
    from keyhole.reuse.cacheblend import CacheBlend as CacheBlend
    from keyhole.reuse.epic import Epic as Epic
    from keyhole.reuse.multi_infllm import MultiInfLLM as MultiInfLLM
    from keyhole.reuse.sam_kv import SamKV as SamKV

#: The public names of each module.
_MODULES = {
    "keyhole.async_llm": "AsyncLLM",
    "keyhole.config": "SamplingParams",
    "keyhole.engine.documents.filling": "Reused",
    "keyhole.engine.sequence": "Piece Result Stats",
    "keyhole.errors": "CapacityError ConfigError KeyholeError ModelError "
    "NumericalError PromptTooLongError RequestError UnknownNameError",
    "keyhole.hf.hooks": "SparseRun SparseStats",
    "keyhole.hf.sparse": "sparse",
    "keyhole.llm": "LLM",
    "keyhole.policies": "available_policies",
    "keyhole.policies.base": "Policy",
    "keyhole.policies.clusterkv": "ClusterKV",
    "keyhole.policies.controls": "Full SlidingWindow",
    "keyhole.policies.delta": "Delta",
    "keyhole.policies.evicting.r_kv": "RKV",
    "keyhole.policies.evicting.raas": "RaaS",
    "keyhole.policies.evicting.snapkv": "SnapKV",
    "keyhole.policies.infllm": "InfLLM",
    "keyhole.policies.omnikv": "OmniKV",
    "keyhole.policies.quest": "Quest",
    "keyhole.policies.seer_attention_r": "SeerAttentionR",
    "keyhole.policies.shadowkv": "ShadowKV",
    "keyhole.policies.spe_context": "SpeContext",
    "keyhole.policies.streaming_llm": "StreamingLLM",
    "keyhole.policies.tidal_decode": "TidalDecode",
    "keyhole.reuse": "available_reuse_methods",
    "keyhole.reuse.base": "Reuse",
    "keyhole.reuse.baselines": "FullReuse Recompute",
    "keyhole.reuse.cacheblend": "CacheBlend",
    "keyhole.reuse.epic": "Epic",
    "keyhole.reuse.multi_infllm": "MultiInfLLM",
    "keyhole.reuse.sam_kv": "SamKV",
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [*_PLACES, "tiny"]  # noqa: PLE0604 # pyright: ignore[reportUnsupportedDunderAll]


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

"""The `config.json` of a model, read without torch, which transformers' own configs import.

A file leaves out what its family takes by default, and older ones name things otherwise; a test
compares what comes of it with transformers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_QWEN = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}

#: What files leave out, and what transformers then takes.
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"q_lora_rank": 1536, "num_experts_per_tok": 8},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt_bigcode": {"n_inner": None, "multi_query": True, "tie_word_embeddings": True},
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
    },
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "phi3": {"original_max_position_embeddings": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}

#: Fields that have another name in a file.
_OTHER_NAMES = {
    "gpt_bigcode": {
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
}

#: Every how many layers one has full attention, where the file lists no layers.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}


def normalised(stored: dict[str, Any]) -> Any:
    """The fields of a `config.json` as attributes, as transformers' config of the family has them.

    Only what `families` and `parameters` ask for; a field that must be there and is not is missing.
    """
    family = stored.get("model_type")
    if family not in DEFAULTS:
        return SimpleNamespace(model_type=family)
    names = _OTHER_NAMES.get(family, {})
    given = {names.get(name, name): value for name, value in stored.items()}
    fields = {"tie_word_embeddings": False, **DEFAULTS[family], **given}
    if not fields.get("use_sliding_window", True):
        fields["sliding_window"] = None
    depth = int(fields["num_hidden_layers"]) if "num_hidden_layers" in fields else 0
    if fields.get("layer_types") is None:
        fields["layer_types"] = _layer_types(family, fields, depth)
    fields["rope_parameters"] = _rope(family, fields)
    return SimpleNamespace(**fields)


def _layer_types(family: str, fields: dict[str, Any], depth: int) -> list[str] | None:
    """Kinds of layers as the family derives them; None where all are of one kind."""
    if family in _FULL_EVERY:
        every = _FULL_EVERY[family]
        if family == "gemma3_text":
            every = int(fields.get("sliding_window_pattern", every))
        sliding = [(layer + 1) % every != 0 for layer in range(depth)]
    elif "use_sliding_window" in fields:
        first = int(fields["max_window_layers"])
        has_window = fields["sliding_window"] is not None
        sliding = [has_window and layer >= first for layer in range(depth)]
    else:
        return None
    return ["sliding_attention" if kind else "full_attention" for kind in sliding]


def _rope(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings under the names of today; `rope_scaling` and `type` are older."""
    found = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    if "type" in found:
        found.setdefault("rope_type", found["type"])
    if family == "phi3" and found.get("rope_type") in ("su", "yarn"):
        found["rope_type"] = "longrope"
    return found

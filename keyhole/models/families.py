"""The supported model families, and the cache shape and length in their configs.

A family is listed if the tests compare its logits with transformers' eager attention.
"""

from __future__ import annotations

from typing import Any

from keyhole.cache.layout import LayerLayout
from keyhole.config import is_count
from keyhole.errors import ModelError

#: `model_type` of the families whose exactness is tested.
SUPPORTED = (
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gpt_bigcode",
    "gpt_oss",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
)

#: RoPE whose frequencies change with the longest position in the call: a long request would change
#: the results of short ones in its batch. Such models run up to the length at which the frequencies
#: change.
_CHANGING_ROPE = ("longrope", "dynamic")


#: Sizes that a config may contain; each is at least 1.
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def check(config: Any, name: str) -> None:
    """ModelError unless the family is supported and its sizes and kinds of layers are valid."""
    if config.model_type not in SUPPORTED:
        raise ModelError(
            f"model {name!r} is of the family {config.model_type!r}, which is not supported; "
            f"supported are {', '.join(SUPPORTED)}"
        )
    _check_sizes(config, name)
    kinds = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if kinds:
        raise ModelError(f"model {name!r} has layers of unsupported kinds: {sorted(kinds)}")


def _check_sizes(config: Any, name: str) -> None:
    """ModelError for a size that no model has, such as -1 layers."""
    for size in _SIZES:
        value = getattr(config, size, None)
        if value is not None and not is_count(value):
            raise ModelError(
                f"the config of {name!r} says {size} {value!r}; it must be a whole number >= 1"
            )


def layouts(config: Any) -> tuple[LayerLayout, ...]:
    """Shape of the cache of each layer."""
    heads = int(config.num_attention_heads)
    if config.model_type == "deepseek_v3":
        rank, rope = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
        latent = LayerLayout(
            num_kv_heads=1,
            key_dim=rank + rope,
            value_dim=rank,
            shared_values=True,
            num_query_heads=heads,
        )
        return (latent,) * int(config.num_hidden_layers)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    if config.model_type == "gpt_bigcode":
        kv_heads = 1 if config.multi_query else heads
    else:
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return tuple(
        LayerLayout(
            num_kv_heads=kv_heads,
            key_dim=dim,
            value_dim=dim,
            window=window,
            num_query_heads=heads,
        )
        for window in _windows(config)
    )


def _windows(config: Any) -> list[int | None]:
    """Each layer's sliding window, or None."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * int(config.num_hidden_layers)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def max_length(config: Any) -> tuple[int, str]:
    """The longest sequence, and the reason for the limit."""
    longest = int(config.max_position_embeddings)
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [ropes] if "rope_type" in ropes else [r for r in ropes.values() if isinstance(r, dict)]
    for rope in ropes:
        if rope.get("rope_type") in _CHANGING_ROPE:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(longest, int(original or longest))
            kind = rope["rope_type"]
            return limit, (
                f"its {kind!r} RoPE changes every token's rotation beyond {limit} tokens, so that "
                "requests of one step would change each other"
            )
    return longest, "the model's max_position_embeddings"

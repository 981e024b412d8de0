"""The weights and peak activations of a model.

Weights are counted from the fields of its config, as transformers builds the modules; nothing is
loaded. A test compares the counts with real models. That is for the families of
`checkpoint.DEFAULTS`, for which `keyhole plan` needs no torch; `models.shrink.build` counts others.
"""

from __future__ import annotations

from typing import Any

#: Peak live activations of a layer, per token: the residual stream and its norm, and in an MLP the
#: outputs of gate and up and their product; in attention the queries and keys before, during and
#: after their rotation.
_STREAMS, _IN_MLP, _IN_ATTENTION = 2, 3, 3


def num_parameters(config: Any) -> int:
    """Weights and stored buffers of a causal language model; tied ones count once."""
    hidden, vocab = int(config.hidden_size), int(config.vocab_size)
    tables = vocab * hidden * (1 if config.tie_word_embeddings else 2)
    if config.model_type == "gpt_bigcode":
        tables += int(config.max_position_embeddings) * hidden
    layers = range(int(config.num_hidden_layers))
    return tables + _norm(config) + sum(num_layer_parameters(config, layer) for layer in layers)


def num_layer_parameters(config: Any, layer: int) -> int:
    """Weights of one decoder layer."""
    norms = 4 if config.model_type in ("gemma2", "gemma3_text") else 2
    if config.model_type == "deepseek_v3":
        attention = _latent_attention(config)
    else:
        attention = _attention(config)
    return attention + _mlp(config, layer) + norms * _norm(config)


def step_numbers(config: Any) -> int:
    """Peak live activations of a layer, per token of a step; an estimate."""
    hidden = int(config.hidden_size)
    heads = int(config.num_attention_heads) + 2 * kv_heads(config)
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    width = getattr(config, "moe_intermediate_size", None) or _intermediate(config)
    mlp = max(experts * int(width), _intermediate(config))
    attention = heads * head_dim(config)
    return _STREAMS * hidden + max(_IN_MLP * mlp, _IN_ATTENTION * attention)


def head_dim(config: Any) -> int:
    """D, the size of a head's keys."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim)
    if getattr(config, "is_heterogeneous", False):
        return max(int(own.head_dim) for own in config.per_layer_config)
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def kv_heads(config: Any) -> int:
    """Hkv, the number of KV heads."""
    if config.model_type == "gpt_bigcode":
        return 1 if config.multi_query else int(config.num_attention_heads)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _norm(config: Any) -> int:
    """A norm over the hidden states; GPT-BigCode's has a bias."""
    return int(config.hidden_size) * (2 if config.model_type == "gpt_bigcode" else 1)


def _attention(config: Any) -> int:
    hidden, dim, family = int(config.hidden_size), head_dim(config), config.model_type
    query, key = int(config.num_attention_heads) * dim, kv_heads(config) * dim
    weights = 2 * hidden * query + 2 * hidden * key
    if family == "gpt_bigcode" or getattr(config, "attention_bias", False):
        weights += query + 2 * key + hidden
    elif family == "qwen2":  # a bias for queries, keys and values only
        weights += query + 2 * key
    if family in ("qwen3", "gemma3_text"):  # norms of queries and keys
        weights += 2 * dim
    if family == "gpt_oss":  # a sink per head
        weights += int(config.num_attention_heads)
    return weights


def _latent_attention(config: Any) -> int:
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    rank, rope = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
    nope, value = int(config.qk_nope_head_dim), int(config.v_head_dim)
    query = heads * (nope + rope)
    weights = hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * hidden
    biases = rank + rope + hidden
    if config.q_lora_rank is None:
        weights += hidden * query
    else:
        query_rank = int(config.q_lora_rank)
        weights += hidden * query_rank + query_rank + query_rank * query
        biases += query_rank
    return weights + (biases if config.attention_bias else 0)


def _intermediate(config: Any) -> int:
    """The width of an MLP, under the name that the family has for it."""
    for name in ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"):
        found = getattr(config, name, None)
        if found is not None:
            return max(found) if isinstance(found, list | tuple) else int(found)
    return 4 * int(config.hidden_size)


def _mlp(config: Any, layer: int) -> int:
    hidden, width = int(config.hidden_size), _intermediate(config)
    if config.model_type == "gpt_bigcode":
        return 2 * hidden * width + width + hidden
    gated = 3 * hidden * width
    if config.model_type == "gpt_oss":
        experts = int(config.num_local_experts)
        return experts * (hidden + 1) + experts * (gated + 2 * width + hidden)
    if config.model_type == "deepseek_v3" and layer >= int(config.first_k_dense_replace):
        experts, shared = int(config.n_routed_experts), int(config.n_shared_experts)
        expert = 3 * hidden * int(config.moe_intermediate_size)
        return experts * (hidden + 1) + (experts + shared) * expert
    return gated + (2 * width + hidden if getattr(config, "mlp_bias", False) else 0)

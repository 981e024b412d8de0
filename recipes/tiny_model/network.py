"""The forward pass used in training: Llama without what training on short answers does not need.

Same parameters under the same names as `LlamaForCausalLM`, hence the same function (a test
compares the logits). But logits are made only where an answer is supervised, weights are cast
once per step to the working precision, and on a CPU attention is our own.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from keyhole.eval.tiny_language.curriculum import TrainingBatch
from recipes.tiny_model.attention import causal_attention

Weights = dict[str, Tensor]


def _rotations(positions: Tensor, config: LlamaConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give RoPE's cosines and signed sines, `[B, T, 1, D]`, for `positions` `[B, T]`."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
    frequencies = config.rope_parameters["rope_theta"] ** -half.float()
    angles = positions[..., None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((second, first), -1) * sin


def _norm(x: Tensor, weight: Tensor, config: LlamaConfig) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    return (wide * scale).to(x.dtype) * weight


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    if queries.device.type == "cpu":
        return causal_attention(queries, keys, values)
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def _layer(
    x: Tensor, weights: Weights, prefix: str, turns: tuple[Tensor, Tensor], config: LlamaConfig
) -> Tensor:
    rows, length, _ = x.shape
    num_heads, num_kv = config.num_attention_heads, config.num_key_value_heads
    attention = prefix + "self_attn."
    project = torch.cat([weights[f"{attention}{name}_proj.weight"] for name in "qkv"])
    normed = _norm(x, weights[prefix + "input_layernorm.weight"], config)
    heads = (normed @ project.T).view(rows, length, -1, config.head_dim)
    turned = _rotate(heads[:, :, : num_heads + num_kv], *turns).transpose(1, 2)
    values = heads[:, :, num_heads + num_kv :].transpose(1, 2)
    mixed = _attend(turned[:, :num_heads], turned[:, num_heads:], values)
    mixed = mixed.transpose(1, 2).reshape(rows, length, -1)
    x = x + mixed @ weights[attention + "o_proj.weight"].T

    normed = _norm(x, weights[prefix + "post_attention_layernorm.weight"], config)
    both = torch.cat([weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    gate, up = (normed @ both.T).chunk(2, -1)
    return x + (F.silu(gate) * up) @ weights[prefix + "mlp.down_proj.weight"].T


def supervised_logits(
    weights: Weights, batch: TrainingBatch, config: LlamaConfig, dtype: torch.dtype
) -> Tensor:
    """Give the logits `[n, vocabulary]`, float32, at the supervised places of a batch."""
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    embedding = cast["model.embed_tokens.weight"]
    turns = _rotations(batch.positions, config, dtype)
    x = F.embedding(batch.tokens, embedding)
    for layer in range(config.num_hidden_layers):
        x = _layer(x, cast, f"model.layers.{layer}.", turns, config)
    x = _norm(x.flatten(0, 1)[batch.supervised], cast["model.norm.weight"], config)
    return (x @ embedding.T).float()

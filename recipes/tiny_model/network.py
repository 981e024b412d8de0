"""The model's size, and the forward pass used in training.

This is Llama reduced to what training on short answers needs. It has the parameters and names of
`LlamaForCausalLM`, hence the same function (a test compares the logits). Logits are computed only
where an answer is supervised, and weights are cast once per step to the working precision. On a
CPU, our own attention is two to three times as fast as torch's: each chunk of queries attends only
to the keys up to its end, which saves half of the products, and the query heads of a key head are
stacked into one matrix product. The probabilities are kept for the backward pass, which needs
nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from keyhole.eval.tiny_language.world import BOS, EOS, PAD, VOCABULARY_SIZE, WORD_IDS
from recipes.tiny_model.curriculum import TrainingBatch
from recipes.tiny_model.steadiness import Steadiness

HIDDEN_SIZE = 192
ROPE_THETA = 1e8


def llama_config(
    num_layers: int = 6, hidden_size: int = HIDDEN_SIZE, rope_theta: float = ROPE_THETA
) -> LlamaConfig:
    """Return the configuration of a model with `num_layers` layers.

    `rope_theta` splits the 16 rotations of a head of 32 numbers: 5 fast ones distinguish distances
    (1e10 leaves 4, too few: see benchmarks/LOG.md), and the slow ones, which hardly rotate over
    thousands of tokens, compare contents.
    """
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=WORD_IDS[BOS],
        eos_token_id=WORD_IDS[EOS],
        pad_token_id=WORD_IDS[PAD],
    )


_CHUNK = 128
"""Queries per chunk: small enough that little is computed beyond the diagonal."""


def _chunks(length: int) -> list[tuple[int, int]]:
    size = max(_CHUNK, length // 8)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


class _CausalAttention(torch.autograd.Function):
    """Queries `[N, G, T, D]`, already scaled, over keys and values `[N, T, D]`; N = B * Hkv."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows, group, length, size = queries.shape
        out = torch.empty_like(queries)
        probabilities = []
        for start, end in _chunks(length):
            width = end - start
            chunk = queries[:, :, start:end].reshape(rows, group * width, size)
            scores = torch.bmm(chunk, keys[:, :end].transpose(1, 2))
            future = scores.new_full((width, width), float("-inf")).triu_(1)
            scores.view(rows, group, width, end)[..., start:] += future
            weights = scores.softmax(-1)
            mixed = torch.bmm(weights, values[:, :end])
            out[:, :, start:end] = mixed.view(rows, group, width, size)
            probabilities.append(weights)
        ctx.save_for_backward(queries, keys, values, *probabilities)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        queries, keys, values, *probabilities = ctx.saved_tensors
        rows, group, length, size = queries.shape
        to_queries = torch.empty_like(queries)
        to_keys, to_values = torch.zeros_like(keys), torch.zeros_like(values)
        for (start, end), weights in zip(_chunks(length), probabilities, strict=True):
            width = end - start
            chunk = queries[:, :, start:end].reshape(rows, group * width, size)
            above = grad[:, :, start:end].reshape(rows, group * width, size)
            to_values[:, :end] += torch.bmm(weights.transpose(1, 2), above)
            to_weights = torch.bmm(above, values[:, :end].transpose(1, 2))
            to_scores = torch._softmax_backward_data(to_weights, weights, -1, weights.dtype)
            to_queries[:, :, start:end] = torch.bmm(to_scores, keys[:, :end]).view(
                rows, group, width, size
            )
            to_keys[:, :end] += torch.bmm(to_scores.transpose(1, 2), chunk)
        return to_queries, to_keys, to_values


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend `[B, Hq, T, D]` over `[B, Hkv, T, D]` causally; returns `[B, Hq, T, D]`."""
    rows, num_heads, length, size = queries.shape
    num_kv = keys.shape[1]
    stacked = (queries * size**-0.5).reshape(rows * num_kv, num_heads // num_kv, length, size)
    out: Tensor = _CausalAttention.apply(  # type: ignore[no-untyped-call]
        stacked,
        keys.reshape(rows * num_kv, length, size),
        values.reshape(rows * num_kv, length, size),
    )
    return out.view(rows, num_heads, length, size)


Weights = dict[str, Tensor]


def _rotations(positions: Tensor, config: LlamaConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return RoPE's cosines and signed sines, `[B, T, 1, D]`, for `positions` `[B, T]`."""
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
    x: Tensor,
    weights: Weights,
    prefix: str,
    turns: tuple[Tensor, Tensor],
    config: LlamaConfig,
    steadiness: Steadiness | None,
) -> Tensor:
    rows, length, _ = x.shape
    num_heads, num_kv = config.num_attention_heads, config.num_key_value_heads
    attention = prefix + "self_attn."
    project = torch.cat([weights[f"{attention}{name}_proj.weight"] for name in "qkv"])
    normed = _norm(x, weights[prefix + "input_layernorm.weight"], config)
    heads = (normed @ project.T).view(rows, length, -1, config.head_dim)
    turned = _rotate(heads[:, :, : num_heads + num_kv], *turns).transpose(1, 2)
    values = heads[:, :, num_heads + num_kv :].transpose(1, 2)
    queries, keys = turned[:, :num_heads], turned[:, num_heads:]
    if steadiness is not None:
        steadiness.add(queries, keys)
    mixed = _attend(queries, keys, values)
    mixed = mixed.transpose(1, 2).reshape(rows, length, -1)
    x = x + mixed @ weights[attention + "o_proj.weight"].T

    normed = _norm(x, weights[prefix + "post_attention_layernorm.weight"], config)
    both = torch.cat([weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    gate, up = (normed @ both.T).chunk(2, -1)
    return x + (F.silu(gate) * up) @ weights[prefix + "mlp.down_proj.weight"].T


def supervised_logits(
    weights: Weights,
    batch: TrainingBatch,
    config: LlamaConfig,
    dtype: torch.dtype,
    steadiness: Steadiness | None = None,
) -> Tensor:
    """Return the logits `[n, vocabulary]`, float32, at the supervised tokens of a batch.

    steadiness: sees the queries and keys of every layer.
    """
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    embedding = cast["model.embed_tokens.weight"]
    turns = _rotations(batch.positions, config, dtype)
    x = F.embedding(batch.tokens, embedding)
    for layer in range(config.num_hidden_layers):
        x = _layer(x, cast, f"model.layers.{layer}.", turns, config, steadiness)
    x = _norm(x.flatten(0, 1)[batch.supervised], cast["model.norm.weight"], config)
    return (x @ embedding.T).float()

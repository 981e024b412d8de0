"""Causal attention for training on a CPU, two to three times as fast as the library's there.

Queries are taken in chunks, each against the keys up to its own end, so that half of the products
are never made; the query heads that share a key head are stacked into one matrix product. The
probabilities are kept for the backward pass, which needs nothing else.
"""

from typing import Any

import torch
from torch import Tensor

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
    """Attend `[B, Hq, T, D]` over `[B, Hkv, T, D]` causally; gives `[B, Hq, T, D]`."""
    rows, num_heads, length, size = queries.shape
    num_kv = keys.shape[1]
    stacked = (queries * size**-0.5).reshape(rows * num_kv, num_heads // num_kv, length, size)
    out: Tensor = _CausalAttention.apply(  # type: ignore[no-untyped-call]
        stacked,
        keys.reshape(rows * num_kv, length, size),
        values.reshape(rows * num_kv, length, size),
    )
    return out.view(rows, num_heads, length, size)

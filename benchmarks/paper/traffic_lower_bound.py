"""The fewest bytes that steps must move, for whole answers and one by one, from a model's shape.

At equal bandwidth these bytes bound the speed-up of reading less, if all keys and values are
resident. Copies, and the selection's reads other than the head's keys, are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.paper.kinds import ThroughputSettings
from keyhole.bench.model import RESERVE_BYTES
from keyhole.bench.settings import SHAPES, DecodeSettings


@dataclass(frozen=True, kw_only=True)
class TrafficBound:
    """requests: the most whole requests that fit. gain: speed-up over reading everything."""

    requests: int
    gain: float


def traffic_bound(settings: ThroughputSettings) -> TrafficBound:
    """The bound for SpeContext at its budget over the whole answer; only for Llama shapes.

    A step's bytes are linear in the length, so their mean is that of the middle of the answer.
    """
    decode = settings.decode
    shape, size = SHAPES[decode.shape], getattr(torch, decode.dtype).itemsize
    assert "model_type" not in shape, "another family has other weights"
    assert decode.token_budget is not None
    head_bytes = size * shape["num_key_value_heads"] * shape["head_dim"]
    token_bytes = kv_bytes(decode)
    room = settings.memory - RESERVE_BYTES - size * num_weights(decode.shape)
    requests = max(0, room // ((settings.prompt + settings.answer) * token_bytes))
    weights = size * weights_read(decode.shape)
    length = settings.prompt + settings.answer // 2
    dense = weights + requests * length * token_bytes
    chosen = min(length, decode.token_budget) * token_bytes + length * head_bytes
    return TrafficBound(requests=requests, gain=dense / (weights + requests * chosen))


def kv_bytes(decode: DecodeSettings) -> int:
    """Bytes of the keys and values of one token in all layers."""
    shape, size = SHAPES[decode.shape], getattr(torch, decode.dtype).itemsize
    heads = shape["num_key_value_heads"] * shape["head_dim"]
    return int(2 * size * shape["num_hidden_layers"] * heads)


def step_gain(decode: DecodeSettings, context: int) -> float:
    """How much faster than a dense step of one sequence one is that reads the weights alone."""
    weights = getattr(torch, decode.dtype).itemsize * weights_read(decode.shape)
    return float(1 + context * kv_bytes(decode) / weights)


def weights_read(shape_name: str) -> int:
    """The number of weights of a Llama of this shape that a step reads."""
    shape = SHAPES[shape_name]
    # A step reads one row of the embedding per token; a tied one is also read in full at the end.
    embedding = 0 if shape["tie_word_embeddings"] else shape["vocab_size"] * shape["hidden_size"]
    return num_weights(shape_name) - int(embedding)


def num_weights(shape_name: str) -> int:
    """The number of weights of a Llama of this shape."""
    shape = SHAPES[shape_name]
    width = shape["hidden_size"]
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    layer = width * (heads * shape["head_dim"] + 3 * shape["intermediate_size"] + 2)
    tables = 1 if shape["tie_word_embeddings"] else 2
    total = tables * shape["vocab_size"] * width + shape["num_hidden_layers"] * layer + width
    return int(total)

"""Rotary positions of a retrieval head: plain, as its draft was trained, or stretched by YaRN.

YaRN (Peng et al., ICLR 2024, section 3.4): slow frequencies are divided by the factor, fast ones
are kept, and logits are scaled by (0.1 ln(factor) + 1)^2. The formulas are transformers' own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from keyhole.retrieval.config import HeadConfig


def frequencies(config: HeadConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair of dimensions, float32 [D / 2], and an attention factor.

    By the latter, 1 without YaRN, transformers multiplies queries and keys; here its square is in
    `RetrievalHead.scale`.
    """
    D, theta = config.head_dim, config.rope_theta
    scaling = dict(config.rope_scaling or {})
    if config.rope_factor > 1:  # of "default" or "yarn": a HeadConfig has no other
        scaling["factor"] = scaling.get("factor", 1.0) * config.rope_factor
        scaling.setdefault("original_max_position_embeddings", config.trained_length)
        scaling["rope_type"] = "yarn"
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return theta ** (-torch.arange(0, D, 2, dtype=torch.float32) / D), 1.0
    # One head as wide as the model: the formulas ask for nothing but the head size.
    one_head = LlamaConfig(
        hidden_size=D,
        num_attention_heads=1,
        head_dim=D,
        max_position_embeddings=scaling.get(
            "original_max_position_embeddings", config.trained_length
        ),
        rope_parameters=scaling | {"rope_theta": theta},
    )
    turns, attention_factor = ROPE_INIT_FUNCTIONS[kind](one_head, torch.device("cpu"))
    return turns.float(), float(attention_factor)


def rotate(x: Tensor, positions: Tensor, turns: Tensor) -> Tensor:
    """Every head of x [..., heads, D] rotated to its position, int64 [...]; in x's dtype.

    turns: as `frequencies` gives them. Halves are paired, (0, D / 2), (1, D / 2 + 1), ..., as in
    Llama.
    """
    angles = positions[..., None, None].float() * turns
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

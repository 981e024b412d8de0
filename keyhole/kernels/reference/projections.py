"""The products of a decoder layer for few tokens, with what transformers computes around them.

A Llama layer (Touvron et al., LLaMA, arXiv 2302.13971, section 2.2) has four: queries, keys and
values after an RMS norm (Zhang and Sennrich, arXiv 1910.07467, eq. 4), the output projection and
its residual, the gate and the up projection after a norm (SwiGLU: Shazeer, arXiv 2002.05202, eq.
6), the down projection and its residual. Roundings are those of torch's operations one by one,
except that a kernel need not round the result of a norm.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels.reference.packed import BlockWeight, PackedWeight, packed_linear
from keyhole.kernels.reference.pages import append
from keyhole.kernels.reference.rope import apply_rope

#: The weight of an RMS norm over the last dimension, [I], and its epsilon.
Norm = tuple[Tensor, float]
#: The weight [O, I] of a linear layer.
Weight = Tensor | PackedWeight | BlockWeight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + bias; x [..., I], weight [O, I], bias [O]. Fast for a few tokens."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """An RMS norm over the last dimension, rounded once; x [..., I], weight [I]."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def norm_linears(
    x: Tensor, norm: Norm, weights: tuple[Weight, ...], biases: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """Linear layers of one input after its RMS norm, in the order of their weights.

    x [T, I], weights [O, I] each, biases [O] each or None. Returns one [T, O] for each weight.
    """
    normed = rms_norm(x, *norm)
    return tuple(_product(normed, w, b) for w, b in zip(weights, biases, strict=True))


def norm_swiglu(x: Tensor, norm: Norm, gate: Weight, up: Weight) -> Tensor:
    """SiLU(n W_gate^T) * (n W_up^T) with n the RMS norm of x; x [T, I], weights [O, I]: [T, O]."""
    normed = rms_norm(x, *norm)
    return F.silu(_product(normed, gate)) * _product(normed, up)


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Residual + X W^T + bias; x [T, I], weight [O, I], bias [O], residual [T, O]: [T, O]."""
    return residual + _product(x, weight, bias)


def _product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return packed_linear(x, weight, bias)


def apply_rope_and_append(
    key_pages: Tensor,
    value_pages: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns queries and keys rotated as by `apply_rope`; writes keys and values as `append`.

    query [T, Hq, D]; key, value [T, Hkv, D]; cos, sin [T, D] in the same dtype; slots int64 [T].
    Changes the pages [P, Hkv, page_size, D] in place.
    """
    turned = apply_rope(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None]
    )
    query, key = (x[0].transpose(0, 1) for x in turned)
    append(key_pages, value_pages, key, value, slots)
    return query, key

"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

One latent per token, c [rank], and one rotated key part [rope] are cached, shared by all heads. A
head's key is (W_k c, rope) and its value W_v c. With q = (q_nope, q_rope):

    q . k = (W_k^T q_nope) . c + q_rope . rope        and        sum_i a_i v_i = W_v (sum_i a_i c_i)

so attention runs as multi-query attention over (c, rope) with value c, and nothing is expanded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def absorb(module: Any, query: Tensor) -> Tensor:
    """Queries [T, Hq, nope + rope] moved into the latent space: [T, Hq, rank + rope]."""
    nope = module.qk_nope_head_dim
    latent = torch.einsum("thd,hdr->thr", query[..., :nope], _up(module)[:, :nope])
    return torch.cat([latent, query[..., nope:]], -1)


def expand(module: Any, latent: Tensor) -> Tensor:
    """Attended latents [T, Hq, rank] as values of each head, [T, Hq, v_head_dim]."""
    return torch.einsum("thr,hdr->thd", latent, _up(module)[:, module.qk_nope_head_dim :])


def _up(module: Any) -> Tensor:
    """The up-projection of keys and values, [Hq, nope + v_head_dim, rank]."""
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(module.num_heads, -1, module.kv_lora_rank)

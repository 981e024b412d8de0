"""Prompts on a GPU: the pages gathered once, and over them FlashAttention as torch brings it.

FlashAttention-2 (Dao, arXiv 2307.08691) knows by its place alone whether a token is seen, and which
KV head a query head reads: no mask of T x n and no key per query head is ever made. It takes 16-bit
numbers and heads of up to 256, all alike. A window inside the prompt, soft-capped scores, sinks and
MLA's latents it does not know as torch calls it: these go to the reference. Needs no Triton.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from keyhole.kernels import reference

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256


def prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As the reference."""
    (num_tokens, _, dim), end = query.shape, start + len(query)
    if (
        query.dtype not in _DTYPES
        or dim > _LARGEST_HEAD
        or value_pages.shape[3] != dim
        or (window is not None and window < end)
        or softcap is not None
        or sinks is not None
    ):
        return reference.prefill(
            query,
            key_pages,
            value_pages,
            pages,
            start,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    pages = pages[: -(-end // key_pages.shape[2])]
    key, value = (_in_order(x, pages, query.device)[:, :, :end] for x in (key_pages, value_pages))
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key,
        value,
        attn_mask=causal_lower_right(num_tokens, end),
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _in_order(stored: Tensor, pages: Tensor, device: torch.device) -> Tensor:
    """What some pages hold, [1, Hkv, n, D] on the device, by one copy there."""
    if stored.device != device:  # on the host, for a layer below
        stored = reference.gathered(stored, (pages,), device).transpose(0, 1)
        return stored.flatten(1, 2)[None]
    return stored.transpose(0, 1).index_select(1, pages).flatten(1, 2)[None]

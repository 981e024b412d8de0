"""Prompts on a GPU: gathers the pages once and runs torch's FlashAttention over them.

FlashAttention-2 (Dao, arXiv 2307.08691) applies the causal mask by position and reads each KV head
in place, so that no T x n mask and no key per query head is materialized. It accepts 16-bit numbers
and equal head sizes up to 256. torch's interface to it lacks a window inside the prompt,
soft-capped scores, sinks and MLA's latents: these go to the reference. Needs no Triton.
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
    """The contents of some pages, [1, Hkv, n, D], copied to the device once."""
    if stored.device != device:  # on the host: an offloaded layer
        stored = reference.gathered(stored, (pages,), device).transpose(0, 1)
        return stored.flatten(1, 2)[None]
    return stored.transpose(0, 1).index_select(1, pages).flatten(1, 2)[None]

"""FlashAttention kernels: prompts over gathered pages, dense decode over pages in place."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention.bias import causal_lower_right

from keyhole.kernels import reference
from keyhole.kernels.selection import PagedQuery

# Prompts on a GPU: gathers the pages once and runs torch's FlashAttention over them.
#
# FlashAttention-2 (Dao, arXiv 2307.08691) applies the causal mask by position and reads each KV
# head in place, so that no T x n mask and no key per query head is materialized. It accepts
# 16-bit numbers and equal head sizes up to 256. torch's interface to it lacks a window inside the
# prompt, soft-capped scores, sinks and MLA's latents: these go to the reference. Needs no Triton.


_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256


def prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference."""
    (num_tokens, _, dim), end = query.shape, start + len(query)
    if (
        query.dtype not in _DTYPES
        or dim > _LARGEST_HEAD
        or reference.row_dim(value_pages) != dim
        or (window is not None and window < end)
        or softcap is not None
        or sinks is not None
    ):
        paged = (query, key_pages, value_pages, pages, start)
        return reference.prefill(*paged, scale=scale, window=window, softcap=softcap, sinks=sinks)
    pages = pages[: -(-end // key_pages.shape[2])]
    key, value = (
        reference.dequantised(_in_order(x, pages, query.device)[:, :, :end]).to(query.dtype)
        for x in (key_pages, value_pages)
    )
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


# Dense decode on a GPU by a FlashAttention that reads pages in place.
#
# FlashAttention 3 (Shah et al., arXiv 2407.08608) on Hopper and 4 on Blackwell take a block table;
# torch calls them once the user has activated one in the process:
# `torch.nn.attention.activate_flash_attention_impl("FA3")`, or KEYHOLE_FLASH=FA3 in the
# environment. The version bundled with torch does not read pages of our size. Selections, soft-
# capped scores, sinks and MLA's latents use our own kernels.


varlen: Any
try:
    from torch.nn.attention import varlen
except ImportError:  # torch before 2.10
    varlen = None

_PAGED_DTYPES = (torch.bfloat16, torch.float16)
#: Versions that read pages, by the first number of the GPU's compute capability.
_VERSIONS = {9: "FA3", 10: "FA4"}
#: Weights and results are rounded to bfloat16; the numbers of the example are below 4.
_TOLERANCE = 2.0**-5


@functools.cache
def version() -> str | None:
    """The version in use, checked once; None: no version that reads pages."""
    if os.environ.get("KEYHOLE_KERNELS") == "reference" or not torch.cuda.is_available():
        return None
    wanted = os.environ.get("KEYHOLE_FLASH")
    try:
        if wanted and _why_not(wanted) is None:
            attention.activate_flash_attention_impl(wanted)
    except Exception as error:  # noqa: BLE001 - our own kernels compute instead
        _warn(f"{wanted} cannot be activated: {error}")
        return None
    active = getattr(attention, "current_flash_attention_impl", lambda: None)()
    if wanted and active != wanted:
        _warn(f"KEYHOLE_FLASH={wanted}: {_why_not(wanted)}")
    return active if active is not None and _why_not(active) is None else None


def takes(paged: PagedQuery, softcap: float | None, sinks: Tensor | None) -> bool:
    """Whether it supports dense attention over these operands."""
    query, key_pages, value_pages, _, _ = paged
    (_, num_heads, dim), (_, num_kv_heads, size, _) = query.shape, key_pages.shape
    return (
        query.dtype in _PAGED_DTYPES
        and key_pages.dtype == query.dtype
        and dim == value_pages.shape[3]
        and softcap is None
        and sinks is None
        and key_pages.device == value_pages.device == query.device
        and version() is not None
        and _is_right(query.dtype, num_heads // num_kv_heads, dim, size)
    )


def attend(paged: PagedQuery, scale: float, window: int | None) -> Tensor:
    """One query token per sequence over all its tokens, or the last `window`: [B, Hq, D]."""
    query, key_pages, value_pages, page_table, lengths = paged
    out: Tensor = varlen.varlen_attn(
        query,
        key_pages.transpose(1, 2),
        value_pages.transpose(1, 2),
        cu_seq_q=torch.arange(len(query) + 1, dtype=torch.int32, device=query.device),
        cu_seq_k=None,
        max_q=1,
        max_k=page_table.shape[1] * key_pages.shape[2],
        scale=scale,
        # The query is the last token.
        window_size=(-1, -1) if window is None else (window - 1, 0),
        enable_gqa=query.shape[1] != key_pages.shape[1],
        seqused_k=lengths.int(),
        block_table=page_table.int().contiguous(),
    )
    return out


def _why_not(name: str) -> str | None:
    """Why a version cannot read our pages here; None if it may."""
    if varlen is None or not hasattr(attention, "current_flash_attention_impl"):
        return "it needs torch 2.12 or later"
    parameters = inspect.signature(varlen.varlen_attn).parameters
    if not {"block_table", "seqused_k", "enable_gqa"} <= parameters.keys():
        return "it needs torch 2.12 or later"
    major, minor = torch.cuda.get_device_capability()
    if name != _VERSIONS.get(major):
        return f"it does not read pages on a GPU of compute capability {major}.{minor}"
    return None


@functools.cache
def _is_right(dtype: torch.dtype, group: int, dim: int, size: int) -> bool:
    """Whether two ragged sequences over mixed pages of this kind are correct; checked once."""
    random = torch.Generator().manual_seed(0)
    counts = [2 * size + (size + 1) // 2, size + 1]
    lengths = torch.tensor(counts, dtype=torch.int32, device="cuda")
    table = torch.tensor([[3, 0, 4], [2, 1, 0]], dtype=torch.int32, device="cuda")
    pages = torch.randn(5, 2, size, 2 * dim, generator=random).to("cuda", dtype)
    keys, values = pages.split(dim, -1)
    query = torch.randn(2, 2 * group, dim, generator=random).to("cuda", dtype)
    paged, scale = PagedQuery(query, keys, values, table, lengths), dim**-0.5
    try:
        for window in (None, size + 1):
            wanted = reference.attend(paged, scale=scale, window=window)
            if not torch.allclose(attend(paged, scale, window), wanted, 0.0, _TOLERANCE):
                _warn("its results are wrong")
                return False
    except Exception as error:  # noqa: BLE001 - our own kernels compute instead
        _warn(str(error))
        return False
    return True


def _warn(why: str) -> None:
    warnings.warn(
        f"FlashAttention over pages cannot be used here, Keyhole's own kernels replace it: {why}",
        RuntimeWarning,
        stacklevel=3,
    )

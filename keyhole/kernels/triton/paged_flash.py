"""Dense decode on a GPU by a FlashAttention that reads pages in place.

FlashAttention 3 (Shah et al., arXiv 2407.08608) on Hopper and 4 on Blackwell take a block table;
torch calls them once the user has activated one in the process:
`torch.nn.attention.activate_flash_attention_impl("FA3")`, or KEYHOLE_FLASH=FA3 in the environment.
The version bundled with torch does not read pages of our size. Selections, soft-capped scores,
sinks and MLA's latents use our own kernels.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from keyhole.kernels import reference

varlen: Any
try:
    from torch.nn.attention import varlen
except ImportError:  # torch before 2.10
    varlen = None

_DTYPES = (torch.bfloat16, torch.float16)
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
        _warn(f"{wanted} cannot be activated, {error}")
        return None
    active = getattr(attention, "current_flash_attention_impl", lambda: None)()
    if wanted and active != wanted:
        _warn(f"KEYHOLE_FLASH={wanted}: {_why_not(wanted)}")
    return active if active is not None and _why_not(active) is None else None


def takes(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> bool:
    """Whether it supports dense attention over these operands."""
    (_, num_heads, dim), (_, num_kv_heads, size, _) = query.shape, key_pages.shape
    return (
        query.dtype in _DTYPES
        and dim == value_pages.shape[3]
        and softcap is None
        and sinks is None
        and key_pages.device == value_pages.device == query.device
        and version() is not None
        and _is_right(query.dtype, num_heads // num_kv_heads, dim, size)
    )


def attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """One query token per sequence over all its tokens, or the last `window`: [B, Hq, D]."""
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
    if not {"block_table", "seqused_k", "enable_gqa"} <= {*_parameters(varlen.varlen_attn)}:
        return "it needs torch 2.12 or later"
    major, minor = torch.cuda.get_device_capability()
    if name != _VERSIONS.get(major):
        return f"it does not read pages on a GPU of compute capability {major}.{minor}"
    return None


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


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
    paged, scale = (query, keys, values, table, lengths), dim**-0.5
    try:
        for window in (None, size + 1):
            wanted = reference.attend(*paged, scale=scale, window=window)
            if not torch.allclose(attend(*paged, scale, window), wanted, 0.0, _TOLERANCE):
                _warn("its results are wrong")
                return False
    except Exception as error:  # noqa: BLE001 - our own kernels compute instead
        _warn(str(error))
        return False
    return True


def _warn(why: str) -> None:
    warnings.warn(
        f"FlashAttention over pages cannot be used here, our own kernels do its work: {why}",
        RuntimeWarning,
        stacklevel=3,
    )

"""Dense decode on a GPU by a FlashAttention that reads pages where they are.

FlashAttention 3 (Shah et al., arXiv 2407.08608) on Hopper and 4 on Blackwell take a block table;
torch calls them once a process has activated one, which is the user's to do:
`torch.nn.attention.activate_flash_attention_impl("FA3")`, or KEYHOLE_FLASH=FA3 in the environment.
The version that torch brings itself does not read pages of our size. Selections, soft-capped
scores, sinks and MLA's latents stay with our own kernels.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
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
_LARGEST_HEAD = 256
#: Versions that read pages, by the first number of the GPU's compute capability.
_VERSIONS = {9: "FA3", 10: "FA4"}
#: Weights and results are rounded to bfloat16; the numbers of the example are below 4.
_TOLERANCE = 2.0**-5


@functools.cache
def version() -> str | None:
    """Which one is used; found out once, by a small example. None: no version that reads pages."""
    if os.environ.get("KEYHOLE_KERNELS") == "reference" or not torch.cuda.is_available():
        return None
    try:
        name = _active()
        if name is None:
            return None
        right = _is_right()
    except Exception as error:  # whatever it is, our own kernels do the work
        warnings.warn(f"{_REFUSED}: {error}", RuntimeWarning, stacklevel=2)
        return None
    if not right:
        warnings.warn(f"{_REFUSED}: its results are wrong", RuntimeWarning, stacklevel=2)
        return None
    return name


_REFUSED = "FlashAttention over pages cannot be used here, our own kernels do its work"


def takes(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> bool:
    """Whether it computes dense attention over these."""
    return (
        query.dtype in _DTYPES
        and query.shape[2] == value_pages.shape[3] <= _LARGEST_HEAD
        and softcap is None
        and sinks is None
        and key_pages.device == value_pages.device == query.device
        and version() is not None
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


def _active() -> str | None:
    """The version that torch calls, if it reads pages; activates the one that is asked for."""
    wanted = os.environ.get("KEYHOLE_FLASH")
    if varlen is None or not hasattr(attention, "current_flash_attention_impl"):
        if wanted:
            raise RuntimeError(f"KEYHOLE_FLASH={wanted} needs torch 2.12 or later")
        return None
    if wanted:
        attention.activate_flash_attention_impl(wanted)
    found = attention.current_flash_attention_impl()
    major, _ = torch.cuda.get_device_capability()
    if found is None or found != _VERSIONS.get(major):
        return None
    known = inspect.signature(varlen.varlen_attn).parameters
    return found if {"block_table", "seqused_k", "enable_gqa"} <= known.keys() else None


def _is_right() -> bool:
    """Two ragged sequences over mixed pages, as plain PyTorch has them."""
    random = torch.Generator().manual_seed(0)
    pages = torch.randn(5, 2, 16, 2 * 64, generator=random).to("cuda", torch.bfloat16)
    keys, values = pages.split(64, -1)
    query = torch.randn(2, 6, 64, generator=random).to("cuda", torch.bfloat16)
    table = torch.tensor([[3, 0, 4], [2, 1, 0]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([37, 18], dtype=torch.int32, device="cuda")
    paged = query, keys, values, table, lengths
    for window in (None, 5):
        wanted = reference.attend(*paged, scale=0.125, window=window)
        if not torch.allclose(attend(*paged, 0.125, window), wanted, 0.0, _TOLERANCE):
            return False
    return True

"""The operations on an NVIDIA GPU, by Triton and FlashAttention: same contracts, same results.

Grids and temporary tensors are sized by shapes alone, never by numbers on the device, so that no
call waits for the device and a decode step can be captured in a CUDA graph. Offsets into pages are
64 bits wide. Operands that the kernels do not accept (float64, different dtypes or devices) go to
the reference, and so does everything except `prefill` where Triton is missing or cannot compile.
`KEYHOLE_KERNELS=reference` in the environment selects the reference throughout.

    append      one program per new token and KV head
    attend      one per sequence, KV head, block of its query heads and split of the tokens; then
                one per query head that combines the splits
    sparse_prefill  one per query head and tile of queries, over the blocks selected for them, or
                over a list of tokens, each query's up to its own position
    scores      the same, storing the scores, and one per block of tokens that computes the weights
    bounds      one per page and KV head; one per sequence, KV head and block of pages
    top_k       one per row of scores and block of its entries; six launches
    shift_rope  one per block of tokens
    apply_rope  one per token and block of heads, queries' and keys' together; where pages are
                written too, values' follow
    projections  one per block of rows of a weight, for all of a few tokens
    load_missing  one per sequence, KV head and block of the buffer's slots
    flash_attention  prompts by torch's FlashAttention over the gathered pages, and dense steps of
                `attend` where a FlashAttention for pages is active: no kernel of our own

Nothing here imports Triton before a kernel is needed. With TRITON_INTERPRET=1 in the environment
Triton runs them on CPU tensors, which is how they are tested without a GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from keyhole.kernels.reference.quantised import is_quantised

_MODULES = {
    "append": "moves",
    "attend": "attend",
    "attend_and_score": "scores",
    "head_scores": "scores",
    "prefill": "flash_attention",
    "block_sparse_prefill": "sparse_prefill",
    "sparse_prefill": "sparse_prefill",
    "page_bounds": "page_selection",
    "bound_scores": "page_selection",
    "top_k": "page_selection",
    "shift_rope": "rope",
    "apply_rope": "rope",
    "apply_rope_and_append": "rope",
    "norm_linears": "projections",
    "norm_swiglu": "projections",
    "linear_add": "projections",
    "load_missing": "moves",
}
#: Operations that accept pages in pinned host memory. All read and write them in place, except
#: `prefill`, which copies them.
_FROM_HOST = {
    "load_missing",
    "append",
    "apply_rope_and_append",
    "attend",
    "page_bounds",
    "prefill",
}
#: Operations that torch computes: they need no Triton.
_BY_TORCH = {"prefill"}
#: Operations where only the first operand has the model's dtype: angles are float64.
_MIXED = {"shift_rope"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has(name: str) -> bool:
    """Whether there is a kernel for the operation; it is not imported."""
    return name in _MODULES


def operation(name: str) -> Any:
    """The kernel of the operation `name`, with the signature of its twin."""
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


@functools.cache
def usable() -> bool:
    """Whether Triton is installed and can run a kernel on the GPU; checked once."""
    if os.environ.get("KEYHOLE_KERNELS") == "reference":
        return False
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return False
    # Before 8.0 there are no tensor cores for bfloat16; other vendors' GPUs were not tested.
    if torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        return False
    try:
        pages = torch.zeros(1, 1, 1, 16, device="cuda")
        slots = torch.zeros(1, dtype=torch.int64, device="cuda")
        operation("append")(pages, None, pages[0], None, slots)
    except Exception as error:  # noqa: BLE001 - no C compiler, another Triton: torch computes
        warnings.warn(
            f"Triton cannot run here, so attention is computed by plain PyTorch: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def flash() -> bool:
    """Whether prompts are computed by torch's FlashAttention; checked once."""
    return (
        os.environ.get("KEYHOLE_KERNELS") != "reference"
        and torch.cuda.is_available()
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability() >= (8, 0)
        and torch.backends.cuda.is_flash_attention_available()
        and torch.backends.cuda.flash_sdp_enabled()
    )


def takes(name: str, *tensors: Tensor) -> bool:
    """Whether our GPU kernels accept these: one GPU, one dtype, contiguous rows.

    Pages may be quantised, whatever the dtype of the rest.
    """
    numbers = [x for x in tensors if x.is_floating_point()]
    rows = [x for x in tensors if x.dim() == 4 and is_quantised(x)]
    alike = numbers[:1] if name in _MIXED else numbers
    home = next(x.device for x in tensors if x.is_cuda)
    return (
        all(x.dtype in _DTYPES for x in numbers[:1])
        and all(x.dtype == rows[0].dtype and x.stride(-1) == 1 for x in rows)
        and all(x.dtype == numbers[0].dtype and x.stride(-1) == 1 for x in alike)
        and all(x.device == home or (name in _FROM_HOST and x.is_pinned()) for x in tensors)
        and (flash() if name in _BY_TORCH else usable())
    )

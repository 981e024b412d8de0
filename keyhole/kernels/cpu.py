"""The operations on a CPU, computed by our C++ extension: same contracts, same results.

One binary holds code for Intel's matrix unit (AMX), for AVX-512 with BF16 and VNNI, for AVX2 and
for any processor; the best one that the processor supports is chosen at import. `KEYHOLE_KERNELS`
in the environment selects another one, or `reference`. Operands that the extension does not accept
(float64, operands of different dtypes) go to the reference.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from keyhole.errors import ConfigError
from keyhole.kernels.reference.quantised import is_quantised
from keyhole.kernels.selection import Selection

try:
    from keyhole.kernels import _cpu
except ImportError:  # built without a compiler, or run from a bare copy of the source
    _cpu = None

#: The compiled module; None if it is not installed. It checks its arguments itself.
extension: Any = _cpu

#: The dtypes that it accepts, and their codes.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Of pages, those of 8 bits too.
PAGE_DTYPES = {**DTYPES, torch.int8: 3, torch.uint8: 4}
_MAX_PAGE_SIZE = 1024
_ENVIRONMENT = "KEYHOLE_KERNELS"
REFERENCE = "reference"


def paths() -> tuple[str, ...]:
    """The processor paths available here, best first."""
    return (*([] if extension is None else extension.paths()), REFERENCE)


def use(path: str | None = None) -> str:
    """Selects `path` for the whole process; None: the environment's, or the best one.

    Returns the path's name. ConfigError if this machine does not have it.
    """
    global _path
    wanted = path or os.environ.get(_ENVIRONMENT) or paths()[0]
    if wanted not in paths():
        raise ConfigError(
            f"CPU kernels {wanted!r} are not available here; choose one of {', '.join(paths())}"
        )
    if wanted != REFERENCE:
        extension.use(wanted)
    elif path is None and extension is None:
        warnings.warn(
            "keyhole's CPU extension is not installed; attention is computed by plain PyTorch, "
            "which is many times slower at long contexts. Install a C++ compiler, then run `pip "
            "install keyhole` again.",
            RuntimeWarning,
            stacklevel=2,
        )
    _path = wanted
    return wanted


def current() -> str:
    """The path in use."""
    return _path or use()


_path: str | None = None


def torch_is_slow(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype many times slower here than float32.

    Without AVX-512 it has no vectors for 16 bits (benchmarks/LOG.md).
    """
    return dtype.itemsize == 2 and torch.backends.cpu.get_cpu_capability() == "AVX2"


def most_tokens(dtype: torch.dtype) -> int:
    """Up to so many tokens `linear` is at least as fast as torch's (benchmarks/LOG.md).

    Vectors multiply one token after another. The matrix unit takes sixteen at once, so that reading
    the weights is what takes time.
    """
    if torch_is_slow(dtype):
        return sys.maxsize
    return 64 if dtype == torch.bfloat16 and current() == "amx" else 8


def product(x: Tensor, y: Tensor) -> Tensor:
    """The product of matrices or of batches of them, by way of float32 where that is faster."""
    if x.is_cpu and torch_is_slow(x.dtype):
        return (x.float() @ y.float()).to(x.dtype)
    return x @ y


def takes(*tensors: Tensor) -> bool:
    """Whether the extension computes this: one dtype, contiguous rows, pages it can hold.

    Pages may be quantised, all of them in the same way, whatever the dtype of the rest.
    """
    if current() == REFERENCE:
        return False
    float_dtype = page_dtype = None
    for x in tensors:  # in one pass, as it precedes every operation
        dtype, paged = x.dtype, x.dim() == 4
        if dtype in DTYPES:
            same = dtype == (float_dtype := float_dtype or dtype)
        elif paged and is_quantised(x):
            same = dtype == (page_dtype := page_dtype or dtype)
        elif x.is_cpu and not dtype.is_floating_point:
            continue
        else:
            return False
        fits = not paged or x.shape[2] <= _MAX_PAGE_SIZE
        if not (x.is_cpu and same and fits and x.stride(-1) == 1):
            return False
    return True


def takes_floats(*tensors: Tensor) -> bool:
    """As `takes`, without quantised pages."""
    return takes(*tensors) and not any(x.dim() == 4 and is_quantised(x) for x in tensors)


def takes_columns(*tensors: Tensor) -> bool:
    """As `takes`; keys may also be columns: pages [P, Hkv, page_size, D] with adjacent tokens."""
    rows = (x.mT if x.dim() == 4 and x.stride(2) == 1 else x for x in tensors)
    return takes(*rows) and all(x.shape[2] <= _MAX_PAGE_SIZE for x in tensors if x.dim() == 4)


def key_strides(pages: Tensor) -> tuple[int, ...]:
    """Of pages, heads and tokens; also of the last dimension where keys are columns."""
    return pages.stride()[:3] if pages.stride(3) == 1 else pages.stride()


def address(tensor: Tensor | None) -> int:
    """The address of its data; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def as_int32(tensor: Tensor) -> Tensor:
    """The same numbers, contiguous."""
    return tensor.to(torch.int32).contiguous()


def as_float32(scores: Tensor) -> Tensor:
    """Contiguous scores of any dtype that `takes` accepts."""
    return scores.to(torch.float32).contiguous()


def as_rows(table: Tensor) -> Tensor:
    """A page table with contiguous rows."""
    table = table.to(torch.int32)
    return table if table.stride(-1) == 1 else table.contiguous()


def append(
    key_pages: Tensor,
    value_pages: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
) -> None:
    """As the reference."""
    slots = slots.to(torch.int64).contiguous()
    for pages, rows in ((key_pages, key), (value_pages, value)):
        if pages is not None and rows is not None:
            extension.append(
                (PAGE_DTYPES[rows.dtype], PAGE_DTYPES[pages.dtype]),
                pages.itemsize,
                len(rows),
                pages.shape[1],
                rows.shape[2],
                pages.shape[2],
                pages.data_ptr(),
                pages.stride()[:3],
                rows.data_ptr(),
                rows.stride(0),
                rows.stride(1),
                slots.data_ptr(),
            )


def page_bounds(
    key_pages: Tensor, low: Tensor, high: Tensor, pages: Tensor, filled: Tensor
) -> None:
    """As the reference."""
    assert low.is_contiguous()  # the cache allocates them contiguous
    assert high.is_contiguous()
    pages, filled = pages.to(torch.int64).contiguous(), filled.to(torch.int64).contiguous()
    extension.page_bounds(
        (DTYPES[low.dtype], PAGE_DTYPES[key_pages.dtype]),
        len(pages),
        low.shape[1],
        low.shape[2],
        key_pages.data_ptr(),
        key_strides(key_pages),
        low.data_ptr(),
        high.data_ptr(),
        pages.data_ptr(),
        filled.data_ptr(),
    )


def bound_scores(query: Tensor, low: Tensor, high: Tensor, page_table: Tensor) -> Tensor:
    """As the reference."""
    query, page_table = query.contiguous(), as_rows(page_table)
    low, high = low.contiguous(), high.contiguous()
    (num_rows, num_heads, dim), num_kv_heads = query.shape, low.shape[1]
    num_pages = page_table.shape[1]
    out = torch.empty(num_rows, num_kv_heads, num_pages, dtype=torch.float32)
    extension.bound_scores(
        DTYPES[query.dtype],
        (num_rows, num_heads, num_kv_heads, dim, num_pages),
        query.data_ptr(),
        low.data_ptr(),
        high.data_ptr(),
        page_table.data_ptr(),
        page_table.stride(0),
        out.data_ptr(),
    )
    return out


def summary_scores(query: Tensor, summaries: Tensor, page_table: Tensor, valid: Tensor) -> Tensor:
    """As the reference."""
    assert summaries.is_contiguous()  # the cache allocates them contiguous
    query, page_table, valid = query.contiguous(), as_rows(page_table), as_int32(valid)
    (num_rows, num_heads, dim), num_pages = query.shape, page_table.shape[1]
    of_page, num_kv_heads = summaries.shape[1:3]
    out = torch.empty(num_rows, num_heads, num_pages * of_page, dtype=torch.float32)
    extension.summary_scores(
        DTYPES[query.dtype],
        (num_rows, num_heads, num_kv_heads, dim, num_pages, of_page),
        query.data_ptr(),
        summaries.data_ptr(),
        page_table.data_ptr(),
        page_table.stride(0),
        valid.data_ptr(),
        out.data_ptr(),
    )
    return out


def spread_scores(
    scores: Tensor, numbers: Tensor, page_table: Tensor, first: int, ends: Tensor
) -> Tensor:
    """As the reference."""
    assert numbers.is_contiguous()  # the cache allocates them contiguous
    scores, page_table, ends = as_float32(scores), as_rows(page_table), as_int32(ends)
    (num_rows, num_heads, count), page_size = scores.shape, numbers.shape[2]
    num_pages = page_table.shape[1]
    assert numbers.dtype in (torch.int16, torch.int32), numbers.dtype
    assert (numbers.shape[1], len(page_table), len(ends)) == (num_heads, num_rows, num_rows)
    out = torch.empty(num_rows, num_heads, num_pages * page_size, dtype=torch.float32)
    extension.spread_scores(
        numbers.itemsize,
        (num_rows, num_heads, count, num_pages, page_size),
        first,
        scores.data_ptr(),
        numbers.data_ptr(),
        page_table.data_ptr(),
        page_table.stride(0),
        ends.data_ptr(),
        out.data_ptr(),
    )
    return out


def top_k(
    scores: Tensor, valid: Tensor, k: int, unit: int, *, first: int = 0, last: int = 0
) -> Selection:
    """As the reference."""
    scores, valid = as_float32(scores), as_int32(valid)
    num_rows, num_lists, _ = scores.shape
    indices = torch.empty(num_rows, num_lists, k, dtype=torch.int32)
    counts = torch.empty(num_rows, num_lists, dtype=torch.int32)
    extension.top_k(
        tuple(scores.shape),
        k,
        first,
        last,
        scores.data_ptr(),
        valid.data_ptr(),
        indices.data_ptr(),
        counts.data_ptr(),
    )
    return Selection(indices, counts, unit)


def top_p(
    chosen: Selection,
    scores: Tensor,
    valid: Tensor,
    share: float,
    *,
    least: int = 0,
    first: int = 0,
    last: int = 0,
) -> Selection:
    """As the reference."""
    indices = as_int32(chosen.indices)
    scores, valid = as_float32(scores), as_int32(valid)
    left, counts = torch.empty_like(indices), indices.new_empty(indices.shape[:2])
    extension.trim(
        (*scores.shape, indices.shape[2]),
        share,
        least,
        first,
        last,
        indices.data_ptr(),
        scores.data_ptr(),
        valid.data_ptr(),
        left.data_ptr(),
        counts.data_ptr(),
    )
    return Selection(left, counts, chosen.unit)


def load_missing(
    entries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    key_pages: Tensor,
    value_pages: Tensor | None,
    page_table: Tensor,
    lengths: Tensor,
    rows: Tensor,
    *,
    selection: Selection,
) -> tuple[Selection, Tensor]:
    """As the reference."""
    assert entries.is_contiguous()  # the buffer allocates them contiguous
    assert selection.indices.shape[2] < entries.shape[2], "the last slot is the newest entry's"
    indices, unit = as_int32(selection.indices), selection.unit
    page_table, lengths = as_rows(page_table), as_int32(lengths)
    rows = rows.to(torch.int64).contiguous()
    num_slots, (_, num_heads, page_size, dim) = entries.shape[2], keys.shape
    used = torch.empty(len(rows), num_heads, indices.shape[2], dtype=torch.int32)
    counts, moved = (torch.empty(len(rows), num_heads, dtype=torch.int32) for _ in range(2))
    value_dim = 0 if values is None else values.shape[3]
    extension.load_missing(
        keys.itemsize,
        (len(rows), num_heads, dim, value_dim, page_size, num_slots, unit),
        entries.data_ptr(),
        keys.data_ptr(),
        keys.stride()[:3],
        address(values),
        (0, 0, 0) if values is None else values.stride()[:3],
        key_pages.data_ptr(),
        key_pages.stride()[:3],
        address(value_pages),
        (0, 0, 0) if value_pages is None else value_pages.stride()[:3],
        page_table.data_ptr(),
        page_table.stride(0),
        page_table.shape[1],
        lengths.data_ptr(),
        rows.data_ptr(),
        indices.data_ptr(),
        tuple(indices.shape[1:]),
        used.data_ptr(),
        counts.data_ptr(),
        moved.data_ptr(),
    )
    return Selection(used, counts, unit), moved

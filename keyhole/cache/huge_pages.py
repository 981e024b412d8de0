"""Large tensors backed by 2 MiB memory pages, where the system supports them.

Selected tokens are scattered over a cache of gigabytes. With 4 KiB memory pages nearly every one of
them is a TLB miss (measured: benchmarks/LOG.md).
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

_HUGE_BYTES = 1 << 21
_MADV_HUGEPAGE = 14  # see madvise(2)


def new_empty(like: Tensor, *shape: int) -> Tensor:
    """An uninitialised tensor with the dtype and device of `like`.

    For a large CPU tensor this requests huge pages from Linux before the first write; without any
    available it is an ordinary tensor.
    """
    tensor = like.new_empty(*shape)
    if tensor.device.type == "cpu" and sys.platform == "linux":
        begin = -(-tensor.data_ptr() // _HUGE_BYTES) * _HUGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_BYTES * _HUGE_BYTES
        if begin < end:
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return tensor

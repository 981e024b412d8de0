"""Large tensors in memory pages of two megabytes, where the system has them.

Selected tokens lie anywhere in a cache of gigabytes. With memory pages of four kilobytes the
processor walks its page tables for nearly every one of them (measured: benchmarks/LOG.md).
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

_HUGE_BYTES = 1 << 21
_MADV_HUGEPAGE = 14  # see madvise(2)


def new_empty(like: Tensor, *shape: int) -> Tensor:
    """An uninitialised tensor with the dtype and device of `like`.

    A large one on a CPU asks Linux for huge pages before anything is written to it; a system that
    has none to give changes nothing.
    """
    tensor = like.new_empty(*shape)
    if tensor.device.type == "cpu" and sys.platform == "linux":
        begin = -(-tensor.data_ptr() // _HUGE_BYTES) * _HUGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_BYTES * _HUGE_BYTES
        if begin < end:
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return tensor

"""Large tensors backed by 2 MiB memory pages, which grow without being copied.

Selected tokens are scattered over a cache of gigabytes. With 4 KiB memory pages nearly every one of
them is a TLB miss (measured: benchmarks/LOG.md). On Linux a CPU tensor reserves the address space
that it may grow to; the system provides memory as pages are written, so growth costs no time and
only what is used is held. Reserved addresses cannot be written until the tensor grows into them, so
a limit on private memory (RLIMIT_DATA) counts the tensor's current size, not the size to which it
may grow. Elsewhere, and without address space, growth copies.

The first write to a huge page takes milliseconds in a virtual machine whose host has to provide it.
All layers of a cache write the same rows in a step, so their tensors begin at different places of a
huge page; else all would enter a new one in the same step.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import resource
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

#: A huge page.
HUGE_BYTES = 1 << 21
_MADV_HUGEPAGE = 14  # see madvise(2)
_MAP_NORESERVE = 0x4000  # see mmap(2)
#: Tensor n begins at n times this, modulo 1, of a huge page: the golden ratio spreads any number of
#: tensors evenly.
_STAGGER = (math.sqrt(5) - 1) / 2
_count = itertools.count()
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")  # 2: reserved memory counts as used


def new_empty(like: Tensor, *shape: int, most: int = 0) -> Tensor:
    """An uninitialised tensor with the dtype and device of `like`.

    For a large CPU tensor this requests huge pages from Linux before the first write; without any
    available it is an ordinary tensor. most: rows for which address space is reserved.
    """
    reserved = _reserved(like, max(most, shape[0]), *shape[1:]) if most else None
    if reserved is None:
        return _advised(like.new_empty(*shape))
    return _advised(_writable(reserved[: shape[0]]))


def enlarged(tensor: Tensor, count: int, most: int) -> Tensor:
    """`tensor` with at least `count` rows: in place where it has reserved them, else a copy.

    most: rows for which a copy reserves address space.
    """
    if len(tensor) >= count:  # a growth that failed half-way is resumed
        return tensor
    storage, row = tensor.untyped_storage(), tensor.stride(0) * tensor.itemsize
    if row and count * row <= storage.nbytes():
        shape = count, *tensor.shape[1:]
        return _advised(_writable(tensor.new_empty(0).set_(storage, 0, shape, tensor.stride())))
    larger = new_empty(tensor, count, *tensor.shape[1:], most=most)
    larger[: len(tensor)] = tensor
    return larger


def _advised(tensor: Tensor) -> Tensor:
    """The tensor, with huge pages requested where they lie completely inside it.

    Not for reserved memory: the first write beyond the tensor's end would take 2 MiB.
    """
    if is_lazy(tensor):
        begin = -(-tensor.data_ptr() // HUGE_BYTES) * HUGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // HUGE_BYTES * HUGE_BYTES
        if begin < end:
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return tensor


def is_lazy(tensor: Tensor) -> bool:
    """Whether the system provides its memory as it is written, and takes parts of it back."""
    return tensor.device.type == "cpu" and sys.platform == "linux"


def _writable(tensor: Tensor) -> Tensor:
    """The tensor, after making its addresses writable. MemoryError beyond a limit of the system.

    No change for memory that was not reserved.
    """
    if is_lazy(tensor) and tensor.nbytes:
        begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = tensor.data_ptr() + tensor.nbytes
        size, both = ctypes.c_size_t(end - begin), mmap.PROT_READ | mmap.PROT_WRITE
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(begin), size, both):
            raise MemoryError(os.strerror(ctypes.get_errno()))
    return tensor


def _reserved(like: Tensor, most: int, *row: int) -> Tensor | None:
    """A tensor [most, ...] without memory yet; None where that much cannot be reserved.

    Its addresses are not writable yet.
    """
    size = most * math.prod(row) * like.itemsize
    if not is_lazy(like) or not size or _is_counted():
        return None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        mapping = mmap.mmap(-1, HUGE_BYTES + size, flags=flags, prot=mmap.PROT_READ)
    except (OSError, OverflowError):  # exceeds the address space
        return None
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    # torch takes no memory that Python calls read-only, although a part of it becomes writable.
    memory = (ctypes.c_char * len(mapping)).from_address(address)
    memory.mapping = mapping  # type: ignore[attr-defined]  # lives as long as a tensor of it
    place = int(next(_count) * _STAGGER % 1 * HUGE_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
    offset = (place - address) % HUGE_BYTES
    numbers = math.prod(row) * most
    return torch.frombuffer(memory, dtype=like.dtype, count=numbers, offset=offset).view(most, *row)


def _is_counted() -> bool:
    """Whether reserved address space counts against a limit, of the process or of the system."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return True
    return _OVERCOMMIT.is_file() and _OVERCOMMIT.read_text().strip() == "2"

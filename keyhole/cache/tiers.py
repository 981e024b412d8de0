"""Tiers of offloaded pages: RAM, or files on disk.

Two pairs, one interface: a GPU offloads to pinned host memory, a CPU to a memory-mapped file in a
folder of the user's choice. A layer moves as a whole, in both directions. Every kernel reads and
writes a mapped file directly; the operating system loads its pages, and evicts them under memory
pressure. Each file is mapped twice: the system reads ahead for those that read a layer in order,
but not for those that read scattered tokens, where it would load megabytes for each. When a layer
becomes resident, its file is closed, which frees the disk; pinned memory returns to torch, which
keeps it for the next offloaded layer.

A file never has a name (O_TMPFILE, or unlinked at once), so it disappears with the process, however
that ends: no clean-up is needed at the next start, and processes that share a folder cannot
conflict. `lsof +L1` shows such files.
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from keyhole.errors import CapacityError, ConfigError

#: Bytes copied at once when a layer moves; each block is freed before the next is copied.
BLOCK_BYTES = 64 << 20
# File systems without preallocation: the file grows as it is written.
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Store(Protocol):
    """One layer's offloaded pages.

    scattered: the same memory as the last result of `resized`, for reads of few tokens at a time.
    """

    scattered: Tensor

    def resized(self, count: int) -> Tensor:
        """All pages as one tensor [count, ...]; existing pages keep their contents.

        A smaller `count` than before returns the existing pages. CapacityError, with nothing
        changed, without space.
        """
        ...


class Tier(Protocol):
    """A destination for offloaded pages."""

    def store(self, like: Tensor) -> Store:
        """An empty store for pages of the dtype and shape of `like`, except its first dimension.

        Raises ConfigError if the tier cannot be used.
        """
        ...


class FileTier:
    """Files in `directory`; ConfigError if none can be created."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        _unnamed_file(self.directory).close()

    def store(self, like: Tensor) -> FileStore:
        """See `Tier`."""
        return FileStore(self.directory, like.dtype, like.shape[1:])


class FileStore:
    """Pages in a file that grows without being copied."""

    def __init__(self, directory: Path, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self._directory = directory
        self._shape = tuple(shape)
        self._file = _unnamed_file(directory)
        weakref.finalize(self, self._file.close)
        self._tensor = self.scattered = torch.empty(0, *shape, dtype=dtype)

    def resized(self, count: int) -> Tensor:
        """See `Store`. Earlier tensors remain views of the same pages."""
        if count <= len(self._tensor):
            return self._tensor
        dtype = self._tensor.dtype
        size = count * dtype.itemsize * torch.Size(self._shape).numel()
        self._reserve(size)
        # A mapping lives as long as a tensor that views it.
        both = [mmap.mmap(self._file.fileno(), size) for _ in range(2)]
        if hasattr(mmap, "MADV_RANDOM") and size:
            both[1].madvise(mmap.MADV_RANDOM)
        self._tensor, self.scattered = (
            torch.frombuffer(mapping, dtype=dtype).view(count, *self._shape) for mapping in both
        )
        return self._tensor

    def _reserve(self, size: int) -> None:
        """Extends the file. Writing to a mapping without disk space kills the process (SIGBUS)."""
        number, before = self._file.fileno(), self._tensor.nbytes
        space = os.fstatvfs(number)
        free = space.f_bavail * space.f_frsize
        if size - before > free:
            raise self._full(size - before, free)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(number, before, size - before)
            else:
                os.ftruncate(number, size)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                os.ftruncate(number, before)
                raise self._full(size - before, free, f" ({error.strerror})") from error
            os.ftruncate(number, size)

    def _full(self, need: int, free: int, reason: str = "") -> CapacityError:
        return CapacityError(
            f"{need / 2**20:.0f} MiB more of keys and values do not fit into "
            f"{str(self._directory)!r}, which has {free / 2**20:.0f} MiB left{reason}; name a "
            "directory with more space, or lower max_batch or max_length"
        )


class PinnedTier:
    """Pinned host memory, which a GPU can copy from while it computes."""

    def store(self, like: Tensor) -> PinnedStore:
        """See `Tier`."""
        return PinnedStore(like.dtype, like.shape[1:])


class PinnedStore:
    """Pages in pinned memory."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self._tensor = self.scattered = torch.empty(0, *shape, dtype=dtype)

    def resized(self, count: int) -> Tensor:
        """See `Store`."""
        before = self._tensor
        if count > len(before):
            larger = torch.empty(
                count, *before.shape[1:], dtype=before.dtype, pin_memory=torch.cuda.is_available()
            )
            larger[: len(before)] = before
            self._tensor = self.scattered = larger
        return self._tensor


def move(resident: Tensor, offloaded: Tensor) -> None:
    """Copies pages [count, ...] of a layer to its new tensor; the contents of `resident` are lost.

    CPU memory is freed block by block, so that at most one block is held twice at a moment when
    memory is short.
    """
    step = max(1, BLOCK_BYTES // max(1, resident[:1].nbytes))
    for start in range(0, len(resident), step):
        offloaded[start : start + step] = resident[start : start + step]
        discard(resident[: start + step])


def discard(tensor: Tensor) -> None:
    """Returns the memory of a contiguous tensor to the system; its contents become undefined."""
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return
    unit = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // unit) * unit
    end = (tensor.data_ptr() + tensor.nbytes) // unit * unit
    if begin < end:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _unnamed_file(directory: Path) -> io.FileIO:
    try:
        return tempfile.TemporaryFile(dir=directory, buffering=0)
    except OSError as error:
        raise ConfigError(
            f"keys and values cannot be kept in {str(directory)!r}: {error.strerror}; name a "
            "directory that exists and can be written to"
        ) from error

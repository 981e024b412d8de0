"""Where offloaded pages go: to RAM, or to files on disk.

Two pairs, one interface: below a GPU's memory lies pinned memory of the host, below a CPU's memory
a file, mapped into memory, in a folder of the user's choice. A layer moves as a whole, down and up
again. What lies in a mapped file can be read and written by every kernel as it is; the operating
system fetches it, and drops it again under pressure. When a layer has come up, its file is closed,
which frees the disk; pinned memory goes back to torch, which keeps it for the next layer down.

A file has no name from its first moment on (O_TMPFILE, or unlinked at once), so it ends with the
process, however that ends: nothing is left to be cleaned up at the next start, and processes that
share a folder cannot meet. `lsof +L1` shows such files.
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

#: Bytes that are copied at once when a layer moves, and given back above before the next.
BLOCK_BYTES = 64 << 20
# Where space cannot be set aside, the file grows as it is written.
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Store(Protocol):
    """One layer's offloaded pages."""

    def resized(self, count: int) -> Tensor:
        """All pages as one tensor [count, ...]; those there before are as they were.

        A smaller `count` than before gives what there is. CapacityError if there is no room, and
        nothing has changed.
        """


class Tier(Protocol):
    """A place for offloaded pages."""

    def store(self, like: Tensor) -> Store:
        """An empty store for pages with the dtype and shape, but for the first number, of `like`.

        Raises ConfigError if the place cannot be used.
        """


class FileTier:
    """Files in `directory`; ConfigError if there cannot be any."""

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
        self._tensor = torch.empty(0, *shape, dtype=dtype)

    def resized(self, count: int) -> Tensor:
        """See `Store`. Tensors of before go on to show the same pages."""
        if count <= len(self._tensor):
            return self._tensor
        dtype = self._tensor.dtype
        size = count * dtype.itemsize * torch.Size(self._shape).numel()
        self._reserve(size)
        # The mapping lives as long as a tensor that shows it.
        mapping = mmap.mmap(self._file.fileno(), size)
        self._tensor = torch.frombuffer(mapping, dtype=dtype).view(count, *self._shape)
        return self._tensor

    def _reserve(self, size: int) -> None:
        """Makes the file this long. A mapping without space behind it would kill the process."""
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
    """Memory of the host that a GPU can copy from while it computes."""

    def store(self, like: Tensor) -> PinnedStore:
        """See `Tier`."""
        return PinnedStore(like.dtype, like.shape[1:])


class PinnedStore:
    """Pages in pinned memory."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self._tensor = torch.empty(0, *shape, dtype=dtype)

    def resized(self, count: int) -> Tensor:
        """See `Store`."""
        before = self._tensor
        if count > len(before):
            larger = torch.empty(
                count, *before.shape[1:], dtype=before.dtype, pin_memory=torch.cuda.is_available()
            )
            larger[: len(before)] = before
            self._tensor = larger
        return self._tensor


def move(upper: Tensor, lower: Tensor) -> None:
    """Copies pages [count, ...] of a resident layer to `lower`; what `upper` holds is lost.

    Memory of a CPU is given back block by block, so that nothing is held twice at any time, at a
    moment when there is none to spare.
    """
    step = max(1, BLOCK_BYTES // max(1, upper[:1].nbytes))
    for start in range(0, len(upper), step):
        lower[start : start + step] = upper[start : start + step]
        discard(upper[: start + step])


def discard(tensor: Tensor) -> None:
    """Gives the memory of a contiguous tensor back; what it holds then is undefined."""
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

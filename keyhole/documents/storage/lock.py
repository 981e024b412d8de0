"""File locks between processes: they are released when the process ends, however it ends.

One lock per store serialises changes. A lease is a shared lock on one record: a leased record is in
use and is not deleted.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Lease", "is_free", "locked"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Lease:
    """Marks the file at `path` as in use, until `close`.

    create: make the file if there is none; otherwise FileNotFoundError.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        while True:
            self._descriptor = os.open(path, flags, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_SH)
                if not create or os.fstat(self._descriptor).st_nlink:
                    return
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # it was deleted while we waited

    def close(self) -> None:
        """Releases the file; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def is_free(path: Path) -> Iterator[bool]:
    """Whether there is no lease on `path`; inside the block no lease can begin.

    A missing file is free; one that cannot be opened is not.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:
            free = False
        yield free
    finally:
        os.close(descriptor)

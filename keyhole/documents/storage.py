"""Storage of documents: the interface of a backend, and a local folder with file locks.

A backend holds two folders of immutable files, which are only replaced as a whole: `documents`, the
sources, and `records`, the models' encodings. It is a folder of this machine, or any URL that
fsspec supports (`remote`).

In a local folder, a file is written under `parts`, locked by its writer, synced to disk (fsync),
and renamed. A process that dies leaves an unlocked part, which the next start deletes.

File locks are released when a process ends, in any way. One lock per store serialises changes. A
lease is a shared lock on one record: a leased record is in use and is not deleted.
"""

from __future__ import annotations

import fcntl
import os
import resource
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Entry(NamedTuple):
    """A file in a listing.

    stamp: changes when the file is replaced. written: seconds since 1970, UTC; None if unknown.
    """

    size_bytes: int
    stamp: str
    written: float | None


class StorageReader(Protocol):
    """An open file.

    identity: the same only as long as the file's content is the same; None if that is not known.
    bytes_read: bytes requested from the backend so far. is_local: many small reads take about as
    long as a large one.
    """

    is_local: bool
    identity: str | None
    size: int
    bytes_read: int

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The bytes of these ranges, uint8 [stop - start] each; OSError if they cannot be read."""
        ...

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fills each memory with the bytes from this position on; as `read`. Safe from threads."""
        ...

    def close(self) -> None:
        """Closes the file; tensors that were read stay valid."""
        ...


class Staged(Protocol):
    """A file that is written but not yet committed."""

    def commit(self) -> str:
        """Commits the file atomically; returns its stamp, "" if unknown."""
        ...

    def discard(self) -> None:
        """Discards the file; no effect after `commit`."""
        ...


class StorageBackend(Protocol):
    """Files by relative paths such as "records/x". Every failure raises OSError.

    url: for messages. folder: the local folder, if it is writable. grace_s: age from which
    unreferenced files are deleted, because another machine may be about to commit a reference; 0 if
    all writers share one lock.
    """

    url: str
    folder: Path | None
    grace_s: float

    def files(self, folder: str) -> dict[str, Entry]:
        """The files in "documents" or "records", by name."""
        ...

    def heads(self, paths: Sequence[str], most_bytes: int) -> list[bytes]:
        """The beginning of each file, b"" where it cannot be read.

        OSError if a remote storage responds for none of them.
        """
        ...

    def read(self, path: str) -> bytes:
        """The whole file; FileNotFoundError if there is none."""
        ...

    def reader(self, path: str) -> StorageReader:
        """The file, open; FileNotFoundError if there is none."""
        ...

    def stage(self, path: str, pieces: Sequence[bytes | memoryview]) -> Staged:
        """Writes a file without committing it; a failure leaves nothing behind."""
        ...

    def remove(self, path: str) -> None:
        """Deletes a file; no effect if it does not exist."""
        ...

    def lease_path(self, path: str) -> Path | None:
        """A local file to lock while the file is read; None if there is none."""
        ...

    def clean(self) -> None:
        """Deletes partial files of crashed writers."""
        ...


_PARTS = "parts"

#: Nanoseconds after which a further write has another time on any file system (FAT counts in 2 s).
_SETTLED_NS = 2_000_000_000


class LocalStorage:
    """A `StorageBackend` in a local folder, which is created if missing; a read-only one can be
    read. folders: of the files.
    """

    grace_s = 0.0

    def __init__(self, folder: Path, folders: tuple[str, ...] = ("documents", "records")) -> None:
        self.url = str(folder)
        self._folder = folder
        self.folder: Path | None = folder
        try:
            for name in (*folders, _PARTS):
                (folder / name).mkdir(parents=True, exist_ok=True)
            with open(folder / "lock", "ab"):
                pass
        except OSError:
            if not (folder / folders[0]).is_dir():
                raise
            self.folder = None

    def files(self, folder: str) -> dict[str, Entry]:
        """See `StorageBackend`."""
        found: dict[str, Entry] = {}
        with os.scandir(self._folder / folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has just removed it
                    if entry.is_file():
                        found[entry.name] = _entry(entry.stat())
        return found

    def heads(self, paths: Sequence[str], most_bytes: int) -> list[bytes]:
        """See `StorageBackend`."""
        return [self._head(path, most_bytes) for path in paths]

    def _head(self, path: str, most_bytes: int) -> bytes:
        try:
            with open(self._folder / path, "rb") as file:
                return file.read(most_bytes)
        except OSError:
            return b""

    def read(self, path: str) -> bytes:
        """See `StorageBackend`."""
        return (self._folder / path).read_bytes()

    def reader(self, path: str) -> LocalReader:
        """See `StorageBackend`."""
        return LocalReader(self._folder / path)

    def stage(self, path: str, pieces: Sequence[bytes | memoryview]) -> LocalStaged:
        """See `StorageBackend`."""
        return LocalStaged(self._folder / _PARTS, self._folder / path, pieces)

    def remove(self, path: str) -> None:
        """See `StorageBackend`."""
        (self._folder / path).unlink(missing_ok=True)

    def lease_path(self, path: str) -> Path:
        """The file itself."""
        return self._folder / path

    def clean(self) -> None:
        """See `StorageBackend`."""
        for part in (self._folder / _PARTS).iterdir():
            with is_free(part) as free:
                if free:
                    part.unlink(missing_ok=True)


class LocalReader:
    """A file that is read into new memory.

    It is not mapped: if another program truncates a mapped file, every process that reads it is
    killed (SIGBUS).
    """

    is_local = True
    identity: str | None

    def __init__(self, path: Path) -> None:
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._file = open(path, "rb", buffering=0, opener=_opened)  # noqa: SIM115 - until `close`
        status = os.fstat(self._file.fileno())
        self.size = status.st_size
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        self.identity = None
        # A file that has just been written may change again without a new time.
        if time.time_ns() - changed > _SETTLED_NS:
            numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, changed)
            self.identity = "-".join(map(str, numbers))

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        """See `StorageReader`."""
        found = [torch.empty(stop - start, dtype=torch.uint8) for start, stop in ranges]
        memory = [memoryview(data.numpy().data) for data in found]
        self.read_into([(start, own) for (start, _), own in zip(ranges, memory, strict=True)])
        return found

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageReader`."""
        number = self._file.fileno()
        for start, rest in parts:
            stop = start + len(rest)
            while len(rest):
                count = os.preadv(number, [rest], stop - len(rest))
                if not count:
                    raise OSError(f"the file ends at byte {stop - len(rest)}, before byte {stop}")
                rest = rest[count:]
        with self._lock:
            self.bytes_read += sum(len(memory) for _, memory in parts)

    def close(self) -> None:
        """See `StorageReader`."""
        self._file.close()


class LocalStaged:
    """See `Staged`."""

    def __init__(self, folder: Path, target: Path, pieces: Sequence[bytes | memoryview]) -> None:
        self._target = target
        self._descriptor, self._part = _new_part(folder)
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while len(rest):
                    rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except BaseException:
            self.discard()
            raise

    def commit(self) -> str:
        """See `Staged`."""
        os.replace(self._part, self._target)
        stamp = _entry(os.fstat(self._descriptor)).stamp
        self._close()
        _sync_folder(self._target.parent)
        return stamp

    def discard(self) -> None:
        """See `Staged`."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._part.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


def _new_part(folder: Path) -> tuple[int, Path]:
    while True:
        part = folder / f"{uuid.uuid4().hex}.part"
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, part
        os.close(descriptor)  # another process deleted it before it was locked


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable against power failures."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(status: os.stat_result) -> Entry:
    return Entry(status.st_size, f"{status.st_size}-{status.st_mtime_ns}", status.st_mtime)


#: Files that remain for everything else in this process, such as the index.
_SPARE_FILES = 64


def _opened(path: str | Path, flags: int) -> int:
    """A descriptor of the file. An open document has two, and a question may be over hundreds: when
    they become too many for this process, it is allowed twice as many, where the system permits it.
    """
    descriptor = os.open(path, flags, 0o666)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptor + _SPARE_FILES > soft != resource.RLIM_INFINITY:
        more = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    return descriptor


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

    create: create the file if it is missing; otherwise FileNotFoundError.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        while True:
            self._descriptor = _opened(path, flags)
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
    """Whether there is no lease on `path`; inside the block no lease can start.

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

"""Documents at an fsspec URL: reads byte ranges, and commits files atomically.

Object stores (such as S3) show an object only when its upload is complete, so it is uploaded under
its final name. On other file systems it is uploaded under a temporary name and moved. Machines that
share a URL share no lock: the last writer of a name wins, and unreferenced files are deleted only
when they are a day old.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem

from keyhole.config import require
from keyhole.documents.integrity import sha256
from keyhole.documents.source import local_folder
from keyhole.documents.storage import Entry, LocalStorage, StorageBackend
from keyhole.errors import ConfigError, UnknownNameError, one_line

if TYPE_CHECKING:
    from torch import Tensor


# Protocols whose uploads are atomic. "memory" is fsspec's own, within one process.
_OBJECT_STORES = set("s3 s3a gs gcs abfs abfss az adl oss oci hf memory".split())
_PARTS = "parts"
_DAY_S = 86_400.0
# With 32 layers the header of a record has about 80 KB.
_HEAD_BYTES = 128 << 10


def open_storage(place: str | Path) -> StorageBackend:
    """A local folder for a path or a file URL, otherwise fsspec's file system for the URL.

    Raises ConfigError for a place that cannot be opened, naming the package that it needs.
    """
    text = str(place)
    require(bool(place), "place of documents", place, "a folder or a URL")
    try:
        folder = place.expanduser().absolute() if isinstance(place, Path) else local_folder(place)
        if folder is not None:
            return LocalStorage(folder)
        system, path = fsspec.core.url_to_fs(text)
        if type(system) is LocalFileSystem:
            return LocalStorage(Path(path))
        return RemoteStorage(system, path, text)
    except ImportError as error:
        raise ConfigError(f"documents at {text!r} need a package: {error}") from error
    except Exception as error:  # any library involved may raise its own error
        protocol = text.partition("://")[0]
        if protocol not in fsspec.available_protocols() and "::" not in text and "://" in text:
            known = fsspec.available_protocols()
            raise UnknownNameError("protocol of a document place", protocol, known) from error
        reason = (isinstance(error, OSError) and error.strerror) or one_line(error)
        raise ConfigError(
            f"documents cannot be stored at {text!r}: {reason}; name a folder or URL that "
            "exists or can be created"
        ) from error


class RemoteStorage:
    """See `StorageBackend`."""

    folder: Path | None = None
    grace_s = _DAY_S

    def __init__(self, system: Any, path: str, url: str) -> None:
        protocol = system.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self.url = url
        self._system, self._path = system, path.rstrip("/")
        self._moves = not names & _OBJECT_STORES
        if self._moves:
            for name in ("documents", "records", _PARTS):
                system.makedirs(self._full(name), exist_ok=True)

    def files(self, folder: str) -> dict[str, Entry]:
        """See `StorageBackend`."""
        with _as_os_error():
            self._system.invalidate_cache(self._full(folder))
            try:
                found = self._system.ls(self._full(folder), detail=True)
            except FileNotFoundError:  # no object in it yet
                return {}
        listed = (info for info in found if info.get("type", "file") == "file")
        return {info["name"].rpartition("/")[2]: _entry(info) for info in listed}

    def heads(self, paths: Sequence[str], most_bytes: int) -> list[bytes]:
        """See `StorageBackend`."""
        full = [self._full(path) for path in paths]
        ends = [most_bytes] * len(full)
        with _as_os_error():
            found = self._system.cat_ranges(full, [0] * len(full), ends, on_error="return")
            errors = [data for data in found if isinstance(data, Exception)]
            failed = [error for error in errors if not isinstance(error, FileNotFoundError)]
            if failed and len(failed) == len(found):
                raise failed[0]
        return [data if isinstance(data, bytes) else b"" for data in found]

    def read(self, path: str) -> bytes:
        """See `StorageBackend`."""
        with _as_os_error():
            return bytes(self._system.cat_file(self._full(path)))

    def reader(self, path: str) -> RemoteReader:
        """See `StorageBackend`."""
        return RemoteReader(self._system, self._full(path))

    def stage(self, path: str, pieces: Sequence[bytes | memoryview]) -> RemoteStaged:
        """See `StorageBackend`. A second copy of the whole file is in memory during the upload."""
        part = self._full(f"{_PARTS}/{uuid.uuid4().hex}.part") if self._moves else None
        return RemoteStaged(self._system, self._full(path), part, b"".join(pieces))

    def remove(self, path: str) -> None:
        """See `StorageBackend`."""
        with _as_os_error(), suppress(FileNotFoundError):
            self._system.rm_file(self._full(path))

    def lease_path(self, path: str) -> Path | None:
        """None: there is no local file."""
        return None

    def clean(self) -> None:
        """See `StorageBackend`; only old parts are deleted, as they may belong to another
        machine.
        """
        if not self._moves:
            return
        now = datetime.now().timestamp()
        for name, entry in self.files(_PARTS).items():
            if entry.written is not None and now - entry.written > self.grace_s:
                self.remove(f"{_PARTS}/{name}")

    def _full(self, path: str) -> str:
        return f"{self._path}/{path}"


class RemoteReader:
    """See `StorageReader`. Returns new memory.

    The beginning of the file is read at once and cached, because later reads often need it.
    """

    is_local = False
    identity: str | None = None

    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self.bytes_read = 0
        self._head = b""
        with _as_os_error():
            system.invalidate_cache(path.rpartition("/")[0])
            self.size = int(system.size(path))
        self._head = self._fetch([(0, min(self.size, _HEAD_BYTES))])[0]

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        """See `StorageReader`; all ranges at once if the file system supports it."""
        known = len(self._head)
        fetched = iter(self._fetch([(start, stop) for start, stop in ranges if stop > known]))
        return [
            _tensor(next(fetched) if stop > known else self._head[start:stop])
            for start, stop in ranges
        ]

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageReader`; all parts at once if the file system supports it."""
        found = self.read([(start, start + len(memory)) for start, memory in parts])
        for (_, memory), data in zip(parts, found, strict=True):
            memory[:] = memoryview(data.numpy().data)

    def _fetch(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        full = [(start, stop) for start, stop in ranges if stop > start]
        paths, starts, stops = [self._path] * len(full), [a for a, _ in full], [b for _, b in full]
        with _as_os_error():
            found = self._system.cat_ranges(paths, starts, stops, on_error="raise") if full else []
        for (start, stop), data in zip(full, found, strict=True):
            self.bytes_read += len(data)
            if len(data) != stop - start:
                raise OSError(f"received {len(data)} bytes instead of {stop - start}")
        parts = iter(found)
        return [bytes(next(parts)) if stop > start else b"" for start, stop in ranges]

    def close(self) -> None:
        """See `StorageReader`."""


class RemoteStaged:
    """See `Staged`. Without a part, the file exists as soon as it is written, and stays.

    A record without its document is harmless: it may even belong to another document with the same
    text.
    """

    def __init__(self, system: Any, target: str, part: str | None, data: bytes) -> None:
        self._system, self._target, self._part = system, target, part
        self._done = False
        with _as_os_error():
            try:
                system.pipe_file(part or target, data)
            except BaseException:
                self.discard()
                raise

    def commit(self) -> str:
        """See `Staged`."""
        if self._part is not None:
            with _as_os_error():
                self._system.mv(self._part, self._target)
        self._done = True
        return ""

    def discard(self) -> None:
        """See `Staged`."""
        if not self._done and self._part is not None:
            with suppress(Exception):  # report the original failure
                self._system.rm_file(self._part)
        self._done = True


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # every remote library raises its own errors
        raise OSError(one_line(error)) from error


def _tensor(data: bytes) -> Tensor:
    # From numpy: torch requires at least one byte, and writable memory.
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def _entry(info: dict[str, Any]) -> Entry:
    times = (
        info.get(key) for key in ("LastModified", "mtime", "last_modified", "updated", "created")
    )
    written = next((_seconds(time) for time in times if time is not None), None)
    stamp = sha256(repr(sorted((key, str(value)) for key, value in info.items())).encode())
    return Entry(int(info["size"] or 0), stamp[:32], written)


def _seconds(time: Any) -> float | None:
    if isinstance(time, datetime):
        return time.timestamp()
    return float(time) if isinstance(time, int | float) else None

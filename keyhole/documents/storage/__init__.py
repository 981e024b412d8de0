"""Storage of documents: a local folder, or any URL that fsspec supports.

A backend holds two folders of immutable files, which are only replaced as a whole: `documents`, the
sources, and `records`, the models' encodings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Entry", "Staged", "StorageBackend", "StorageReader"]


class Entry(NamedTuple):
    """A file in a listing.

    stamp: changes when the file is replaced. written: seconds since 1970 UTC, None if not known.
    """

    size_bytes: int
    stamp: str
    written: float | None


class StorageReader(Protocol):
    """An open file. bytes_read: bytes requested from the backend so far."""

    size: int
    bytes_read: int

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Bytes from start to stop, uint8 [stop - start] each; OSError if they cannot be read."""
        ...

    def close(self) -> None:
        """Tensors that were read stay valid."""
        ...


class Staged(Protocol):
    """A file that is written but not yet committed."""

    def commit(self) -> str:
        """Commits the file atomically; returns its stamp, "" if that is not known."""
        ...

    def discard(self) -> None:
        """Discards the file; no effect after `commit`."""
        ...


class StorageBackend(Protocol):
    """Files by a relative path such as "records/x". Every failure raises OSError.

    url: for messages. folder: this machine's folder if it is one that can be written to.
    grace_s: the age at which an unreferenced file is deleted: another machine may be about to
    commit its reference; 0 where all writers share one lock.
    """

    url: str
    folder: Path | None
    grace_s: float

    def files(self, folder: str) -> dict[str, Entry]:
        """The files in "documents" or "records", by name."""
        ...

    def heads(self, paths: Sequence[str], most_bytes: int) -> list[bytes]:
        """The beginning of each file, b"" where it cannot be read."""
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
        """A file of this machine to lock while the file is read; None if there is none."""
        ...

    def clean(self) -> None:
        """Deletes partial files of crashed writers."""
        ...

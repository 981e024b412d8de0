"""Where stored documents lie: a folder of this machine, or any URL that fsspec understands.

A place holds two folders of files that never change once they are there, but for being replaced as
a whole: `documents`, the sources, and `records`, what models made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Entry", "Place", "Reader", "Staged"]


class Entry(NamedTuple):
    """A file in a listing.

    stamp: changes when the file is replaced. written: seconds since 1970 UTC, None if not known.
    """

    size_bytes: int
    stamp: str
    written: float | None


class StorageReader(Protocol):
    """An open file. bytes_read: what was asked of the place so far."""

    size: int
    bytes_read: int

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Bytes from start to stop, uint8 [stop - start] each; OSError if they cannot be had."""

    def close(self) -> None:
        """Tensors that were read stay as they are."""


class Staged(Protocol):
    """A file that is written, and not there yet."""

    def commit(self) -> str:
        """Puts it in its place, whole; gives its stamp, "" if that is not known."""

    def discard(self) -> None:
        """Takes it away; nothing happens after `commit`."""


class StorageBackend(Protocol):
    """Files by a relative path such as "records/x". Whatever fails raises OSError.

    url: for messages. folder: this machine's folder if it is one that can be written to.
    grace_s: how old a file that belongs to nothing must be to be taken away: other machines may be
    about to say what it belongs to; 0 where all writers use one lock.
    """

    url: str
    folder: Path | None
    grace_s: float

    def files(self, folder: str) -> dict[str, Entry]:
        """What is in "documents" or "records", by name."""

    def heads(self, paths: Sequence[str], most_bytes: int) -> list[bytes]:
        """The beginning of each file, b"" where it cannot be read."""

    def read(self, path: str) -> bytes:
        """The whole file; FileNotFoundError if there is none."""

    def reader(self, path: str) -> StorageReader:
        """The file, open; FileNotFoundError if there is none."""

    def stage(self, path: str, pieces: Sequence[bytes | memoryview]) -> Staged:
        """Writes a file without putting it in its place; a failure leaves nothing behind."""

    def remove(self, path: str) -> None:
        """Nothing happens if it is not there."""

    def lease_path(self, path: str) -> Path | None:
        """A file of this machine to lock while the file is read; None if there is none."""

    def clean(self) -> None:
        """Takes away what writers left that ended while they wrote."""

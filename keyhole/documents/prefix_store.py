"""Keys and values of prompts' prefixes in a folder, so that they outlive a process.

A file holds a chunk of tokens, found by a digest of all tokens up to its end and by a fingerprint
of everything that its numbers depend on. It is a sealed file like a document's record (`record`): a
SHA-256 of each tensor, compared when it is read, and a header that seals these. Files are only
added and removed as a whole, so several processes may use a folder: a file that another process
removes stays readable until it is closed.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.config import is_count, require
from keyhole.documents.integrity import Fingerprint, RecordError, canonical, model_of
from keyhole.documents.record import check_tensor, read_sealed, sealed_file
from keyhole.documents.storage import LocalStorage, locked
from keyhole.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT, _VERSION = "keyhole prefix", "1"
_FOLDER = "prefixes"
_LOG = logging.getLogger("keyhole")


class PrefixStore:
    """Chunks of prompts in a local folder, which is created if missing; a read-only one is read.

    fingerprint: what the numbers depend on; chunks of any other fingerprint are not found.
    limit_bytes: of all files; the least recently used ones are removed first; None: no limit.
    ConfigError if the folder cannot be used.
    """

    def __init__(
        self, folder: str | Path, fingerprint: Fingerprint, limit_bytes: int | None = None
    ) -> None:
        right = "a number of bytes, at least 1"
        require(limit_bytes is None or is_count(limit_bytes), "limit_bytes", limit_bytes, right)
        self._fingerprint = canonical(dict(fingerprint)).decode()
        self._model, self._limit = model_of(fingerprint), limit_bytes
        try:
            self._place = LocalStorage(Path(folder).expanduser().absolute(), (_FOLDER,))
            if self._place.folder is not None:
                self._place.clean()
                self._remove_oldest()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"prefixes at {str(folder)!r} cannot be stored: {reason}") from error

    def has(self, digest: bytes) -> bool:
        """Whether there is a chunk; it may be damaged."""
        return (Path(self._place.url) / self._path(digest)).exists()

    def read(self, digest: bytes) -> dict[str, Tensor] | None:
        """The tensors of a chunk, compared with their digests.

        None if there is no such chunk. A damaged one is removed, and a warning names it.
        """
        path = self._path(digest)
        try:
            return self._checked(path, digest)
        except FileNotFoundError:
            return None
        except (RecordError, OSError) as error:
            what = error.what if isinstance(error, RecordError) else str(error)
            _LOG.warning(
                "the stored prefix %s/%s cannot be used: %s; it is computed again",
                self._place.url,
                path,
                what,
            )
            if self._place.folder is not None and isinstance(error, RecordError):
                self._place.remove(path)
            return None

    def _checked(self, path: str, digest: bytes) -> dict[str, Tensor]:
        reader = self._place.reader(path)
        try:
            text, spans, start = read_sealed(reader, (_FORMAT, _VERSION))
            identity = (text.get("digest"), json.loads(text.get("fingerprint", "null")))
            if identity != (digest.hex(), json.loads(self._fingerprint)):
                raise RecordError("damaged", "it is of other tokens or another model", "its own")
            data = reader.read([(start, reader.size)])[0]
        finally:
            reader.close()
        found = {}
        for key, span in spans.items():
            part = data[span.start - start : span.stop - start]
            check_tensor(key, span, part)
            found[key] = span.tensor(part)
        return found

    def write(
        self, digest: bytes, tensors: Mapping[str, Tensor], before: Sequence[bytes] = ()
    ) -> None:
        """Writes a chunk to disk, unless it is stored already or larger than the limit.

        before: the chunks of the tokens before it, without which it cannot be used; it is removed
        before they are. tensors: on the CPU, contiguous, wide numbers before narrow ones. An error
        becomes a warning; the chunk is then computed again when it is needed.
        """
        if self._place.folder is None or self.has(digest):
            return
        text = {
            "format": _FORMAT,
            "version": _VERSION,
            "digest": digest.hex(),
            "fingerprint": self._fingerprint,
        }
        pieces = sealed_file(tensors, text)
        if self._limit is not None and sum(map(len, pieces)) > self._limit:
            return
        try:
            staged = self._place.stage(self._path(digest), pieces)
            try:
                staged.commit()
            finally:
                staged.discard()
            if self._limit is not None:
                self.touch([*before, digest])
                self._remove_oldest()
        except OSError as error:
            _LOG.warning("a prefix could not be stored at %s: %s", self._place.url, error)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Marks chunks as used now, the first of them as the last."""
        now = time.time_ns()
        for step, digest in enumerate(reversed(digests)):
            # The system's own clock moves on every few milliseconds only.
            used = now + 1000 * step
            try:
                os.utime(Path(self._place.url) / self._path(digest), ns=(used, used))
            except FileNotFoundError:  # removed, perhaps by another process
                continue
            except OSError:  # read-only
                return

    def _remove_oldest(self) -> None:
        """Removes the chunks not used for longest until the others are within the limit."""
        if self._limit is None or self._place.folder is None:
            return
        with locked(self._place.folder / "lock"):
            entries = self._place.files(_FOLDER)
            used = sum(entry.size_bytes for entry in entries.values())
            for name, entry in sorted(entries.items(), key=lambda item: item[1].written or 0.0):
                if used <= self._limit:
                    return
                self._place.remove(f"{_FOLDER}/{name}")
                used -= entry.size_bytes

    def _path(self, digest: bytes) -> str:
        return f"{_FOLDER}/{digest.hex()}-{self._model}"

"""The output file of a batch: one answer per line. It is only appended to, so a killed run can be
resumed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from keyhole.batch.lines import ID_PREFIX
from keyhole.errors import ConfigError, StorageFullError

#: The beginning of every line, even of one that was cut off.
_BEGIN = f'{{"id": "{ID_PREFIX}'.encode()


class BatchOutput:
    """A file of answers that one run at a time appends to; created if it does not exist.

    statuses: by id of each answer, whether it is an answer and not an error. A last line that a
    killed run left incomplete is removed. ConfigError for a file with other content, for one that
    cannot be written, and for one that another run is writing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"{self._name} cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self.statuses: dict[str, bool] = {}
            self._size = 0
            for end, entry in self._stored():
                self.statuses[entry["id"]] = is_answer(entry)
                self._size = end
            os.ftruncate(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Writes an answer, completely or not at all.

        StorageFullError if the disk is full, ConfigError if it cannot be written otherwise.
        """
        data = as_line(entry)
        try:
            _write(self._file, data, self._size)
        except OSError as error:
            with suppress(OSError):  # if this fails, the next run removes it
                os.ftruncate(self._file, self._size)
            reason = f"{self._name} cannot be written: {error.strerror}"
            raise StorageFullError(
                f"{reason}; {len(self.statuses)} answers are kept; repeat the command "
                "when there is room"
            ) from error
        self._size += len(data)
        self.statuses[entry["id"]] = is_answer(entry)

    def sync(self) -> None:
        """Waits until everything is on the disk."""
        os.fsync(self._file)

    @property
    def _name(self) -> str:
        return repr(str(self.path))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{self._name} is being written by another run; name another output, one for "
                "each shard"
            ) from error

    def _stored(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each answer and the offset of its end; adds a missing newline after the last one."""
        end = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            for number, text in enumerate(file, 1):
                entry = _entry(text)
                end += len(text)
                if entry is not None and text.endswith(b"\n"):
                    yield end, entry
                elif entry is not None:
                    _write(self._file, b"\n", end)
                    yield end + 1, entry
                    return
                elif text.endswith(b"\n") or not _was_cut_off(text):
                    raise ConfigError(
                        f"{self._name}, line {number} is not an answer of a batch; remove it or "
                        "name another output"
                    )


def is_answer(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is an answer, not an error."""
    response = entry.get("response") or {}
    return not entry.get("error") and response.get("status_code") == 200


def as_line(entry: Mapping[str, Any]) -> bytes:
    """The line of an entry; its id comes first."""
    return json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _entry(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:  # includes bytes that are not UTF-8
        return None
    good = isinstance(found, dict) and str(found.get("id")).startswith(ID_PREFIX)
    return found if good else None


def _was_cut_off(text: bytes) -> bool:
    """Whether a crash may have left this end of a file: a part of a line, or blocks of zeros."""
    return text.startswith(_BEGIN) or _BEGIN.startswith(text.rstrip(b"\0"))


def _write(file: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written

"""The files of a batch.

Lines of the input: `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`. The output
has one answer per line. It is only appended to, so a killed run can be resumed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.errors import ConfigError, StorageFullError

URLS = ("/v1/chat/completions", "/v1/completions")
#: The prefix of every id of an answer, as in OpenAI's API.
ID_PREFIX = "batch_req_"
#: The error code of a line whose custom_id an earlier line has.
REPEATED = "duplicate_custom_id"


@dataclass(frozen=True)
class BatchLine:
    """A line of the input that is not blank. number: counted from 1."""

    number: int
    text: bytes

    @property
    def id(self) -> str:
        """The id of its answer. It is derived from number and content, so a later run finds the
        same id.
        """
        found = hashlib.sha256(b"%d %b" % (self.number, self.text)).hexdigest()
        return ID_PREFIX + found[:32]


@dataclass(frozen=True)
class BatchRequest:
    """The request in a line, or `problem`, an error code and a message, if the line is invalid."""

    line: BatchLine
    custom_id: str | None
    url: str = ""
    body: Any = None
    problem: tuple[str, str] | None = None


@dataclass(frozen=True)
class Shard:
    """Every `count`-th line, from line `index` on."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From text such as "2/8"; ConfigError for anything else."""
        index, _, count = text.partition("/")
        if index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
            return cls(int(index), int(count))
        raise ConfigError(f"--shard {text!r} must be i/n with i from 1 to n, such as 2/8")

    def has(self, line: BatchLine) -> bool:
        """Whether the line belongs to this shard."""
        return (line.number - self.index) % self.count == 0


def lines_of(texts: Iterable[bytes]) -> Iterator[BatchLine]:
    """The lines of a file that are not blank, without line ends."""
    for number, text in enumerate(texts, 1):
        stripped = text.strip()
        if stripped:
            yield BatchLine(number, stripped)


def read_lines(path: str | Path) -> Iterator[BatchLine]:
    """The lines of a local file; ConfigError if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            yield from lines_of(file)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from error


def requests_of(lines: Iterable[BatchLine]) -> Iterator[BatchRequest]:
    """The request of each line. Of lines with the same custom_id only the first is answered."""
    first: dict[str, int] = {}
    for line in lines:
        found = read_request(line)
        if found.custom_id is not None:
            before = first.setdefault(found.custom_id, line.number)
            if before != line.number:
                reason = f"custom_id {found.custom_id!r} was already used in line {before}"
                found = BatchRequest(line, found.custom_id, problem=(REPEATED, _at(line, reason)))
        yield found


def read_request(line: BatchLine) -> BatchRequest:
    """The request of one line."""
    try:
        given = json.loads(line.text)
    except (ValueError, RecursionError) as error:  # ValueError includes bytes that are not UTF-8
        return BatchRequest(line, None, problem=("invalid_json", _at(line, f"not JSON: {error}")))
    if not isinstance(given, dict):
        reason = f"{_short(given)} must be a JSON object"
        return BatchRequest(line, None, problem=("invalid_json", _at(line, reason)))
    name = given.get("custom_id")
    custom_id = name if isinstance(name, str) and name else None
    problem = _problem(given)
    if problem is not None:
        code = "missing_custom_id" if custom_id is None else "invalid_request"
        return BatchRequest(line, custom_id, problem=(code, _at(line, problem)))
    return BatchRequest(line, custom_id, given["url"], given["body"])


def _problem(given: dict[str, Any]) -> str | None:
    name, method, url, body = (given.get(key) for key in ("custom_id", "method", "url", "body"))
    if not (isinstance(name, str) and name):
        return f"custom_id {_short(name)} must be a string that no other line has"
    if method != "POST":
        return f'method {_short(method)} must be "POST"'
    if url not in URLS:
        return f"url {_short(url)} must be {' or '.join(URLS)}"
    if not isinstance(body, dict):
        return f"body {_short(body)} must be a JSON object"
    if body.get("stream"):
        return "a batch has no streams; leave stream out of the body"
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _at(line: BatchLine, reason: str) -> str:
    return f"line {line.number}: {reason}"


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
        if self.path.exists() and not self.path.is_file() and not self.path.is_dir():
            raise ConfigError(
                f"{self._name} must be a regular file, because a later run reads which requests "
                "it answers"
            )
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
                f"{reason}; {len(self.statuses)} answers were kept; free disk space and repeat the "
                "command"
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
    # Half a character, which JSON can write and UTF-8 cannot, is written as JSON does.
    return json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _entry(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # ValueError includes bytes that are not UTF-8
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

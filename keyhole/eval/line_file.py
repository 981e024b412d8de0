"""A file of JSON lines that a run extends cell by cell, and continues after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from keyhole.config import is_count
from keyhole.errors import ConfigError, why

Line = dict[str, Any]
Row = TypeVar("Row")

GATE, QUESTIONS = "eval-verify", "eval-documents"
"""The `benchmark` field of the suite `paper`'s lines that are not cells of tasks."""
#: Fields by which lines are indexed.
_INDEXED = ("task", "length", "policy")
#: The beginning of every line.
_BEGIN = b'{"'


@dataclass(frozen=True, kw_only=True)
class EvalTable:
    """A table of strings, whose first `left` columns are names.

    title: what all rows have in common. about: how to read the table.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int
    about: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        left: int,
        items: Iterable[Row],
        columns: Mapping[str, Callable[[Row], str]],
        about: str = "",
    ) -> Self:
        """A row for each item; columns: the text of an item by head."""
        rows = [[text(item) for text in columns.values()] for item in items]
        return cls(title=title, heads=list(columns), rows=rows, left=left, about=about)


@dataclass(kw_only=True)
class EvalOutcome:
    """The outcome of all cells or questions, in order.

    lines: measured now or earlier; stored: how many cells, or questions, were measured earlier.
    refused: cells that this model cannot run, with their known fields and `error`.
    """

    lines: list[Line] = field(default_factory=list)
    stored: int = 0
    refused: list[Line] = field(default_factory=list)


class LineFile:
    """The lines of a file, which need not exist yet.

    A last line that was cut off while it was written is ignored, and removed from the file when
    another line is added. ConfigError for any other line that is not a JSON object, for one whose
    `samples` are no number, and for a file that cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            # A device has no lines; some, such as /dev/full, have no end either.
            there = self.path.exists() and not self.path.is_char_device()
            data = self.path.read_bytes() if there else b""
        except OSError as error:
            raise ConfigError(f"{str(self.path)!r} cannot be read: {why(error)}") from error
        *whole, last = data.split(b"\n")
        self.lines = [self._read(text, number) for number, text in enumerate(whole, 1) if text]
        self._size, self._cut_off = len(data), len(last)
        self._between = b""  # what to write before the next line
        found = _object(last)
        if found is None and not (last.startswith(_BEGIN) or _BEGIN.startswith(last)):
            raise self._wrong(len(whole) + 1)  # not a cut-off line of ours: keep it
        if found is not None:  # an editor removed the newline at the end
            self.lines.append(self._read(last, len(whole) + 1))
            self._cut_off, self._between = 0, b"\n"
        self._index: dict[tuple[str, ...], list[Line]] = {}
        for line in self.lines:
            self._index.setdefault(_key(line), []).append(line)

    def find(
        self, wanted: Mapping[str, Any], samples: int, about: Mapping[str, Any] | None = None
    ) -> Line | None:
        """The newest line that has all these values, and at least this many samples.

        about: further values; one that is None may be missing in the line.
        """
        indexed = all(name in wanted for name in _INDEXED)
        lines = self._index.get(_key(wanted), []) if indexed else self.lines
        for line in reversed(lines):
            same = all(name in line and line[name] == value for name, value in wanted.items())
            same = same and all(line.get(name) == value for name, value in (about or {}).items())
            if same and line.get("samples", 0) >= samples:
                return line
        return None

    def add(self, line: Line) -> None:
        """Appends a line and syncs it to disk. ConfigError if it cannot be written."""
        text = json.dumps(line, allow_nan=False) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                if file.tell() == self._size:  # otherwise another run has repaired it
                    # Another run may have replaced it by a line of just this length.
                    if self._cut_off and self._last_byte() != b"\n":
                        file.truncate(self._size - self._cut_off)
                    file.write(self._between)
                file.write(text.encode())
                file.flush()
                if not self.path.is_char_device():  # a device refuses it
                    os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{str(self.path)!r} cannot be written: {why(error)}") from error
        self._size, self._cut_off, self._between = -1, 0, b""
        # As it will be read back: lists instead of tuples.
        self.lines.append(json.loads(text))
        self._index.setdefault(_key(self.lines[-1]), []).append(self.lines[-1])

    def _last_byte(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read()

    def _read(self, text: bytes, number: int) -> Line:
        found = _object(text)
        if found is None:
            raise self._wrong(number)
        if not is_count(found.get("samples", 0), 0):  # `find` compares it
            raise self._wrong(number, f"has samples {found['samples']!r}, not a whole number")
        return found

    def _wrong(self, number: int, wrong: str = "is not a JSON object") -> ConfigError:
        return ConfigError(
            f"{str(self.path)!r}, line {number} {wrong}; remove it or name another file"
        )


def _key(line: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(line.get(name)) for name in _INDEXED)


def _object(text: bytes) -> Line | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # ValueError includes bytes that are not UTF-8
        return None
    return found if isinstance(found, dict) else None

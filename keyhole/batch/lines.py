"""Lines of a batch's input: `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.errors import ConfigError

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

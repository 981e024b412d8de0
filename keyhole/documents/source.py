"""The source of a document, as a file: one line of JSON, then the text or its token ids.

The first line describes the document; any model can encode it again from the rest. A document
exists as long as this file does; records refer to it by the digest of the source.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.config import is_count, require
from keyhole.documents.integrity import RecordError, canonical, is_sealed, seal, sha256
from keyhole.errors import ConfigError

#: Tokens of a block, SamKV's unit (section 4.1).
BLOCK_SIZE = 64
#: The most, as the memory that statistics of a block take grows with its size.
_MOST_BLOCK_SIZE = 1 << 14


def default_place() -> str:
    """Where documents are stored: in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(home) / "keyhole" / "documents")


def place_of(given: str | Path | None, name: str = "documents") -> str:
    """The place that a setting names; None: the default one. ConfigError if it names none."""
    good = given is None or (isinstance(given, str | Path) and given != "")
    require(good, name, given, "a folder or a URL; leave it out for the default one")
    return default_place() if given is None else str(given)


def local_folder(place: str) -> Path | None:
    """The folder that a place names, as a path or a file URL; None for any other URL."""
    protocol, mark, path = place.rpartition("://")
    if mark and protocol not in ("file", "local"):
        return None
    return None if "::" in place else Path(path).expanduser().absolute()


def check_block_size(size: int) -> None:
    """ConfigError unless documents can be stored in blocks of `size` tokens."""
    good = is_count(size) and size <= _MOST_BLOCK_SIZE
    require(good, "block_size", size, f"at least 1 and at most {_MOST_BLOCK_SIZE:,}")


#: Every first line ends before this byte.
HEAD_BYTES = 8192
_MOST_NAME_LENGTH = 200
# In the first line, where all other fields together need far less than the remaining bytes.
_MOST_METADATA_BYTES = 4096
# No UTF-8 text begins with this byte, so no text has the digest of a list of token ids.
_TOKEN_IDS_MARK = b"\xff"


@dataclass(frozen=True)
class Source:
    """A text or token ids, and the bytes in which they are stored.

    digest: SHA-256; for a text, the sha256sum of its UTF-8.
    """

    value: str | list[int]
    body: bytes
    digest: str

    @classmethod
    def of(cls, source: str | Sequence[int]) -> Source:
        """From text or token ids; ConfigError for an empty source and for any other value."""
        if not len(source):
            raise ConfigError("the document is empty; give at least one character or token id")
        if isinstance(source, str):
            try:
                body = source.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"the text of a document is not valid Unicode: {error.reason} at character "
                    f"{error.start}; decode the file with its own encoding"
                ) from error
            return cls(source, body, sha256(body))
        if isinstance(source, bytes | bytearray):
            raise ConfigError("a document must be text or token ids, not bytes; decode it first")
        ids = [int(token) if isinstance(token, np.integer) else token for token in source]
        wrong = [token for token in ids if not (is_count(token, 0) and token < 2**63)]
        if wrong:
            raise ConfigError(
                f"token id {wrong[0]!r} of a document must be a whole number from 0 to 2**63 - 1"
            )
        numbers = np.array(ids, dtype="<i8").tobytes()
        return cls(ids, canonical(ids), sha256(_TOKEN_IDS_MARK + numbers))


@dataclass(frozen=True)
class SourceFile:
    """The first line of the file.

    tokens, block_size: as counted by the model `model` when it stored the document. created:
    seconds since 1970, UTC. metadata: a JSON object.
    """

    name: str
    digest: str
    model: str
    tokens: int
    block_size: int
    created: float
    pinned: bool
    metadata: str = "{}"

    @property
    def file(self) -> str:
        """The file's name."""
        return file_of(self.name)

    def line(self) -> bytes:
        """The sealed line, as it is written."""
        fields = dataclasses.asdict(self)
        if self.metadata == "{}":  # as written by versions without metadata
            fields.pop("metadata")
        return canonical(seal(fields)) + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> SourceFile:
        """From at least the first HEAD_BYTES of a file; RecordError "source" if it is damaged."""
        line, _, _ = data.partition(b"\n")
        try:
            fields: dict[str, Any] = json.loads(line)
            if not is_sealed(fields):
                raise ValueError("its digest is another")
            fields.pop("sha256")
            return cls(**fields)
        except (ValueError, TypeError, AttributeError) as error:
            raise RecordError(
                "source", "the first line of its text's file has changed", "what was written"
            ) from error

    def source(self, data: bytes) -> Source:
        """From the whole file; RecordError "source" if it has neither the right text nor the right
        token ids.

        The first line of `data` may be damaged, as long as it ends in the same place.
        """
        _, _, body = data.partition(b"\n")
        for read in (bytes.decode, json.loads):
            with suppress(ValueError, TypeError, ConfigError):
                found = Source.of(read(body))
                if found.digest == self.digest:
                    return found
        raise RecordError("source", "its text has changed", f"sha256 {self.digest[:12]}", self.name)


def file_of(name: str) -> str:
    """The file name for a document name."""
    return f"{sha256(name.encode())[:32]}.txt"


def check_name(name: str) -> str:
    """`name`; ConfigError unless it is printable, not blank and not too long."""
    good = isinstance(name, str) and name.isprintable() and bool(name.strip())
    if not good or len(name) > _MOST_NAME_LENGTH:
        raise ConfigError(
            f"document name {name!r} must be printable text in one line, not blank, of at most "
            f"{_MOST_NAME_LENGTH} characters"
        )
    return name


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """As it is stored; ConfigError unless it is a JSON object of limited size."""
    right = f"a JSON object of at most {_MOST_METADATA_BYTES} bytes"
    try:
        text = canonical(dict(metadata)).decode()
        same = json.loads(text) == dict(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"metadata of a document must be {right}: {error}") from error
    if not same:
        raise ConfigError(
            f"metadata of a document must be {right}, with text as keys and without tuples"
        )
    size = len(canonical(text))
    if size > _MOST_METADATA_BYTES:
        raise ConfigError(f"metadata of a document must be {right}; this takes {size}")
    return text

"""Integrity of stored documents: digests of texts, fingerprints and sealed headers; errors and
problems.

A sealed header contains the SHA-256 of all its other fields, so that any changed byte of the header
is detected without reading anything else.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keyhole.config import is_number, require
from keyhole.errors import RequestError

#: damaged: changed since it was written. foreign: another model's. missing: the record was evicted
#: or removed, or an older version lacks newer tensors. source: the text itself is damaged, so that
#: it cannot be encoded again.
Kind = Literal["damaged", "foreign", "missing", "source"]


class RecordError(RequestError):
    """A record or a text that cannot be used. Nothing else in the store is affected."""

    def __init__(self, kind: Kind, what: str, right: str, name: str | None = None) -> None:
        self.kind: Kind = kind
        self.what, self.right, self.name = what, right, name
        document = "a document" if name is None else f"document {name!r}"
        if kind == "source":
            helps = "to repair it, add the right text again"
        else:
            # Named, because of documents that are not, evicted ones are left alone.
            called, word = repr(name or "NAME"), shlex.quote(name or "NAME")
            helps = (
                "to encode it again, add the same text, or run "
                f"documents.verify([{called}], repair=True) or "
                f"`keyhole documents verify {word} --repair`"
            )
        super().__init__(f"{document}: {what}; expected {right}; {helps}")

    def of(self, name: str) -> RecordError:
        """The same error with the name of the document."""
        return RecordError(self.kind, self.what, self.right, name)


@dataclass(frozen=True)
class Problem:
    """A problem of the document of this name, and what was expected.

    Problems of every kind except "source" are repaired by encoding the document's source again.
    """

    name: str
    what: str
    right: str
    kind: Kind


def foreign(theirs: Fingerprint, ours: Fingerprint) -> RecordError | None:
    """The error for a record of another model, naming the differences; None if there are none."""
    fields = differences(theirs, ours)
    if not fields:
        return None
    there, here = (
        ", ".join(
            f"{field} {side[field]!r}" if field in side else f"no {field}" for field in fields
        )
        for side in (theirs, ours)
    )
    if "adapter" in ours:  # `documents`, and the command without it, are those of the base model
        here += " (see documents_with(NAME), and --adapter NAME)"
    return RecordError("foreign", f"its record was made by another model: {there}", here)


#: Names and values of all properties of a model that determine its keys and values.
Fingerprint = Mapping[str, str | int | float]
_SEAL = "sha256"
# Hex digits of a fingerprint's digest in a file name; a header holds the fingerprint itself.
_MODEL_DIGITS = 16


def canonical(value: Any) -> bytes:
    """Canonical JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256(data: Any) -> str:
    """SHA-256 of bytes or any contiguous buffer, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def seal(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with their digest."""
    return {**fields, _SEAL: sha256(canonical(fields))}


def is_sealed(fields: Mapping[str, Any]) -> bool:
    """Whether no field has changed since `seal`."""
    rest = {name: value for name, value in fields.items() if name != _SEAL}
    return fields.get(_SEAL) == sha256(canonical(rest))


def model_of(fingerprint: Fingerprint) -> str:
    """A model's name in file names; ConfigError unless all values are text or numbers."""
    require(bool(fingerprint), "fingerprint", fingerprint, "a mapping with at least one field")
    for name, value in fingerprint.items():
        good = isinstance(name, str) and (isinstance(value, str | bool) or is_number(value))
        require(good, f"fingerprint field {name!r}:", value, "a string or a finite number")
    return sha256(canonical(dict(fingerprint)))[:_MODEL_DIGITS]


def differences(one: Fingerprint, other: Fingerprint) -> list[str]:
    """Names of the fields that are not the same in both, sorted."""
    absent = object()
    names = {*one, *other}
    return sorted(n for n in names if one.get(n, absent) != other.get(n, absent))

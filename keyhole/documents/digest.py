"""Digests of texts, of a model's fingerprint, and of sealed headers.

A header is sealed: one of its fields is the SHA-256 of all the others, so that any changed byte of
the header is detected without reading anything else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from keyhole.config import is_number, require

__all__ = ["Fingerprint", "canonical", "differences", "is_sealed", "model_of", "seal", "sha256"]

#: Names and values of all properties of a model that determine its keys and values.
Fingerprint = Mapping[str, str | int | float]
_SEAL = "sha256"
# Hex digits of a fingerprint's digest in a file name; a header holds the fingerprint itself.
_MODEL_DIGITS = 16


def canonical(value: Any) -> bytes:
    """JSON with one spelling."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256(data: Any) -> str:
    """Of bytes or any contiguous buffer, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def seal(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` and the digest of them."""
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
        require(good, f"fingerprint field {name!r}:", value, "a text or a finite number")
    return sha256(canonical(dict(fingerprint)))[:_MODEL_DIGITS]


def differences(one: Fingerprint, other: Fingerprint) -> list[str]:
    """Names of the fields that are not the same in both, sorted."""
    absent = object()
    names = {*one, *other}
    return sorted(n for n in names if one.get(n, absent) != other.get(n, absent))

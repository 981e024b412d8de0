"""Names with settings in one flag: `delta:recent_pages=2,quest:full_layers=0,1`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from keyhole.config import read_setting
from keyhole.errors import ConfigError, UnknownNameError

# A comma inside of a value stands before a number, one between two names before a letter.
_BETWEEN = re.compile(r",(?=\s*[A-Za-z_])")


@dataclass(frozen=True)
class Spec:
    """`name:setting=value:setting=value`; values are text until `typed`."""

    text: str
    name: str
    settings: tuple[tuple[str, str], ...]


def parse(text: str) -> list[Spec]:
    """The names of a flag. ConfigError for one that cannot be read."""
    parts = [part.strip(" ,") for part in _BETWEEN.split(text)]
    return [_spec(part) for part in parts if part]


def typed(spec: Spec, kind: str, fields: Iterable[dataclasses.Field[Any]]) -> dict[str, Any]:
    """The settings in the types of these fields; UnknownNameError for one that is not there."""
    known = {field.name: field for field in fields}
    settings = {}
    for name, value in spec.settings:
        if name not in known:
            raise UnknownNameError(f"setting of {kind} {spec.name}", name, known)
        settings[name] = read_setting(known[name], value, f"{spec.name}:{name}")
    return settings


def _spec(text: str) -> Spec:
    name, *parts = text.split(":")
    pairs = [part.partition("=") for part in parts]
    wrong = [setting for setting, equals, _ in pairs if not (setting and equals)]
    if wrong or not name:
        raise ConfigError(
            f"{text!r} must be a name or name:setting=value, such as delta:recent_pages=2"
        )
    return Spec(text, name, tuple((setting, value) for setting, _, value in pairs))

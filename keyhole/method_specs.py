"""Method names with settings, as text: `delta:token_budget=512,full_layers=0,1`.

Commas separate several, `delta:recent_pages=2,full_layers=0,1,quest`: a part with a colon or
without "=" begins the next name, a number continues the list before it. Policies, reuse methods and
tasks use this syntax everywhere.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from keyhole.config import read_setting
from keyhole.errors import ConfigError, UnknownNameError

_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+")


@dataclass(frozen=True)
class Spec:
    """A name and its settings; values are text until `typed`."""

    name: str
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """As it is written."""
        return written(self.name, self.settings)


def written(name: str, settings: Iterable[tuple[str, str]]) -> str:
    """A name and its settings as `parse` reads them."""
    pairs = ",".join(f"{setting}={value}" for setting, value in settings)
    return f"{name}:{pairs}" if pairs else name


def parse(text: str) -> list[Spec]:
    """The names in a text, with their settings; ConfigError for an invalid part."""
    found: list[tuple[str, list[list[str]]]] = []
    for part in map(str.strip, text.split(",")):
        before, equals, value = part.partition("=")
        name, colon, setting = before.partition(":")
        settings = found[-1][1] if found else []
        if not part:
            continue
        if colon:
            found.append((name.strip(), settings := []))
        elif not equals and settings and _NUMBER.fullmatch(part):
            settings[-1][1] += f",{part}"
            continue
        elif not equals:
            found.append((part, []))
            continue
        else:
            setting = before
        right = bool(equals and setting.strip()) and (bool(settings) or bool(colon and name))
        if not right:
            raise ConfigError(
                f"{part!r} must be a name, or a name with settings such as "
                "delta:recent_pages=2,full_layers=0,1"
            )
        settings.append([setting.strip(), value.strip()])
    return [Spec(name, tuple((s, v) for s, v in settings)) for name, settings in found]


def parse_one(text: str, kind: str) -> Spec:
    """The name of a text and its settings; kind: what errors call it."""
    if ":" not in text:  # a name, or any path
        return Spec(text.strip())
    first, *others = parse(text)
    if others:
        raise ConfigError(f"{text!r} names {1 + len(others)} methods; give one {kind}")
    return first


def typed(spec: Spec, kind: str, fields: Iterable[dataclasses.Field[Any]]) -> dict[str, Any]:
    """The settings in the types of these fields; UnknownNameError for an unknown one."""
    known = {field.name: field for field in fields}
    settings = {}
    for given, value in spec.settings:
        name = given.replace("-", "_")
        if name not in known:
            raise UnknownNameError(f"setting of {kind} {spec.name}", given, known)
        settings[name] = read_setting(known[name], value, f"{spec.name}:{name}")
    return settings

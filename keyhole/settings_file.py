"""A JSON file that names a policy with its settings, and may name a reuse method with its own.

    {"policy": "quest", "settings": {"token_budget": 1024}, "num_layers": 32}

Its path is accepted wherever a policy or a reuse method is given by name, as in
`LLM(policy="FILE.json")` and `keyhole generate --policy FILE.json`. `keyhole eval --suite paper`
writes one, with what was measured beside it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from keyhole.config import SCALARS, is_count, kind_of
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.method_specs import parse_one

_SUFFIX = ".json"


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """A policy and a reuse method by name, each with its settings as JSON has them.

    reuse: None where the file names no reuse method. num_layers: layers of the model that the
    settings were measured on; None: any model. measured: how and where; nothing depends on it.
    """

    policy: str
    settings: dict[str, Any] = field(default_factory=dict)
    reuse: str | None = None
    reuse_settings: dict[str, Any] = field(default_factory=dict)
    num_layers: int | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The file of this path; ConfigError names it and says what is wrong with it."""
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the settings file {str(path)!r}: {error}") from error
        if not isinstance(stored, dict) or "policy" not in stored:
            raise ConfigError(
                f"{str(path)!r} is not a settings file: it must be a JSON object that names a "
                'policy, such as {"policy": "quest", "settings": {"token_budget": 1024}}'
            )
        known = {one.name: one for one in dataclasses.fields(cls)}
        for name, value in stored.items():
            if name not in known:
                raise UnknownNameError(f"field of {str(path)!r}", name, known)
            right = _wrong(str(known[name].type), value)
            if right:
                raise ConfigError(f"{str(path)!r}: {name} {value!r} must be {right}")
        return cls(**stored)

    def save(self, path: str | Path) -> None:
        """Writes the file; ConfigError if it cannot be written."""
        text = json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the settings {str(path)!r}: {error}") from error


def is_settings_file(method: object) -> bool:
    """Whether this is the path of such a file, not the name of a method."""
    return isinstance(method, Path) or (isinstance(method, str) and method.endswith(_SUFFIX))


def method_in(path: str | Path, kind: str) -> tuple[str, dict[str, Any]]:
    """Name and settings of the method of a kind, "policy" or "reuse".

    ConfigError for a file that cannot be read, or names no such method.
    """
    file = SettingsFile.read(path)
    if kind == "policy":
        return file.policy, file.settings
    if file.reuse is None:
        raise ConfigError(f"{str(path)!r} names no reuse method: it has no field 'reuse'")
    return file.reuse, file.reuse_settings


def require_depth(method: object, num_layers: int) -> None:
    """ConfigError if `method` is a settings file for models with another number of layers."""
    method = parse_one(method, "policy").name if isinstance(method, str) else method
    if isinstance(method, str | Path) and is_settings_file(method):
        measured = SettingsFile.read(method).num_layers
        if measured not in (None, num_layers):
            raise ConfigError(
                f"{str(method)!r} is for a model of {measured} layers, this one has {num_layers}"
            )


def from_json(
    path: str | Path, cls: type[Any], kind: str, stored: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a class from what JSON has: tuples for lists.

    kind: what errors call the method, "policy quest". UnknownNameError for a setting that the class
    does not have; ConfigError for a value of another type. Both name the file.
    """
    known = {one.name: one for one in dataclasses.fields(cls)}
    settings = {}
    for name, value in stored.items():
        if name not in known:
            raise UnknownNameError(f"setting of {kind} in {str(path)!r}", name, known)
        right = _wrong(str(known[name].type), value)
        if right:
            raise ConfigError(f"{str(path)!r}: {name} {value!r} must be {right}")
        is_list = kind_of(known[name]).startswith("tuple") and value is not None
        settings[name] = tuple(value) if is_list else value
    return settings


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{kind: (good, right) for kind, (good, right, _) in SCALARS.items()},
    "tuple[int, ...]": (
        lambda value: isinstance(value, list) and all(is_count(one, 0) for one in value),
        "a list of numbers such as [0, 1]",
    ),
    "dict[str, Any]": (lambda value: isinstance(value, dict), "an object"),
}


def _wrong(annotation: str, value: object) -> str | None:
    """What a value of this type must be, if it is not so; a type that is not known takes all."""
    kind = annotation.removesuffix(" | None")
    if kind not in _TYPES or (value is None and kind != annotation):
        return None
    good, right = _TYPES[kind]
    return None if good(value) else right

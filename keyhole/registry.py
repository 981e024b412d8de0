"""Methods by name: the tables, and a method's settings as text or as a JSON file.

Tables of methods by name: built-in ones, and those of other packages' entry points.

A line of such a table is "package.module:Class". Nothing is imported before it is used.

A method with its settings, as text (`delta:token_budget=512`) or as a JSON file.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from keyhole.config import SCALARS, from_settings, is_count, kind_of, read_setting, require_known
from keyhole.errors import ConfigError, UnknownNameError, why

Method = TypeVar("Method")


class Registry(Generic[Method]):
    """Methods of one kind by name.

    kind: the users' word for them. base: their base class. group: of entry points. ours: the
    built-in ones; they come first and cannot be replaced. default: the one used if none is named.
    field: of a settings file that names one.
    """

    def __init__(
        self,
        kind: str,
        base: type[Method],
        group: str,
        ours: Mapping[str, str],
        default: str,
        field: str,
    ) -> None:
        self._kind, self._base, self._group = kind, base, group
        self._ours, self._default, self._field = ours, default, field

    def classes(self) -> dict[str, type[Method]]:
        """Every class by name: built-in ones in the order of the table, then entry points."""
        return {name: self._load(name, place) for name, place in self._places().items()}

    def names(self) -> list[str]:
        """Every name in the same order; no method is imported."""
        return list(self._places())

    def make(
        self, method: Method | str | Path | None, settings: Mapping[str, Any] | None = None
    ) -> Method:
        """A method from itself, from its name, or the default from None.

        Settings may follow the name, "delta:token_budget=512", or be passed as keywords, which take
        precedence; a settings file replaces a name with settings. UnknownNameError for an unknown
        name or setting; ConfigError for a method that cannot be loaded, for an invalid file, and
        for settings passed with an object.
        """
        if isinstance(method, self._base):
            if settings:
                raise ConfigError(
                    f"settings {sorted(settings)} can be given with a {self._kind}'s name only, "
                    "not with an object"
                )
            return method
        spec = parse_one(method, self._kind) if isinstance(method, str) else Spec(str(method))
        name, stored = self._default if method is None else spec.name, None
        if method is not None and is_settings_file(spec.name):
            name, stored = method_in(spec.name, self._field)
        name, places = self.canonical(name), self._places()
        if name not in places:
            where = "" if stored is None else f" in {spec.name!r}"
            raise UnknownNameError(f"{self._kind}{where}", name, places)
        # Only this one is loaded: a broken package affects only its users.
        cls: Any = self._load(name, places[name])
        fields = dataclasses.fields(cls)
        given = typed(Spec(name, spec.settings), self._kind, fields) | dict(settings or {})
        if stored is not None:
            given = from_json(spec.name, cls, f"{self._kind} {name}", stored) | given
        made: Method = from_settings(cls, f"{self._kind} {name}", given)
        return made

    def canonical(self, name: str) -> str:
        """The table's name for spellings such as DELTA or Tidal-Decode; unknown names stay."""
        return {_plain(known): known for known in self._places()}.get(_plain(name), name)

    def _places(self) -> dict[str, str]:
        places = dict(self._ours)
        for name, place in _entry_points(self._group, tuple(sys.path)):
            places.setdefault(name, place)
        return places

    def _load(self, name: str, place: str) -> type[Method]:
        module, _, attribute = place.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # another package's module may raise any error
            raise ConfigError(
                f"{self._kind} {name!r} cannot be loaded from {place!r}: {error}"
            ) from error
        if not (isinstance(found, type) and issubclass(found, self._base)):
            base = self._base.__name__
            raise ConfigError(
                f"{self._kind} {name!r}: {place!r} is not a subclass of keyhole.{base}"
            )
        return found


@functools.cache
def _entry_points(group: str, path: tuple[str, ...]) -> list[tuple[str, str]]:
    """Names and values of a group; `path` is `sys.path`, where importlib looks for packages.

    It reads files of every installed package, which takes 10 ms, and `make` is called per request.
    """
    return [(point.name, point.value) for point in entry_points(group=group)]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


# Method names with settings, as text: `delta:token_budget=512,full_layers=0,1`.
#
# Commas separate several, `delta:recent_pages=2,full_layers=0,1,quest`: a part with a colon or
# without "=" begins the next name, a number continues the list before it. Policies, reuse methods
# and tasks use this syntax everywhere.


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


# A JSON file that names a policy with its settings, and may name a reuse method with its own.
#
#     {"policy": "quest", "settings": {"token_budget": 1024}, "num_layers": 32}
#
# Its path is accepted wherever a policy or a reuse method is given by name, as in
# `LLM(policy="FILE.json")` and `keyhole generate --policy FILE.json`. `keyhole eval --suite paper`
# writes one, with the measurements that led to it.


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
            stored = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read the settings file {str(path)!r}: {why(error)}"
            ) from error
        if not isinstance(stored, dict) or "policy" not in stored:
            raise ConfigError(
                f"{str(path)!r} is not a settings file: it must be a JSON object that names a "
                'policy, such as {"policy": "quest", "settings": {"token_budget": 1024}}'
            )
        known = {one.name: one for one in dataclasses.fields(cls)}
        for name, value in stored.items():
            require_known(f"field of {str(path)!r}", name, known)
            right = _wrong(str(known[name].type), value)
            if right:
                raise ConfigError(f"{str(path)!r}: {name} {value!r} must be {right}")
        return cls(**stored)

    def save(self, path: str | Path) -> None:
        """Writes the file as `write_object`."""
        write_object(path, dataclasses.asdict(self), "the settings")


def write_object(path: str | Path, found: Mapping[str, Any], what: str) -> None:
    """Writes a JSON file. ConfigError if there is no room for it; the old one then stays.

    what: its name in the error.
    """
    text = json.dumps(found, indent=2, allow_nan=False) + "\n"
    named = Path(path)
    place = named.resolve()  # the target of a link, which itself stays
    part = place.with_name(f"{place.name}.part")
    try:
        if named.exists() and not (named.is_file() and os.access(place.parent, os.W_OK)):
            named.write_text(text, encoding="utf-8")  # a pipe, or a folder that takes no new file
            return
        part.write_text(text, encoding="utf-8")
        part.replace(place)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {what} {str(path)!r}: {why(error)}") from error


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
                f"{str(method)!r} is for a model of {measured} layers, but this one has "
                f"{num_layers}"
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
        require_known(f"setting of {kind} in {str(path)!r}", name, known)
        right = _wrong(str(known[name].type), value)
        if right:
            raise ConfigError(f"{str(path)!r}: {name} {value!r} must be {right}")
        is_list = isinstance(value, list) and kind_of(known[name]).startswith("tuple")
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

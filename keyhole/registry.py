"""Tables of methods by name: built-in ones, and those of other packages' entry points.

A line of such a table is "package.module:Class". Nothing is imported before it is used.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from keyhole.config import from_settings
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.method_settings import Spec, from_json, is_settings_file, method_in, parse_one, typed

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
                    f"settings {sorted(settings)} go with a {self._kind}'s name, not its object"
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
        for point in entry_points(group=self._group):
            places.setdefault(point.name, point.value)
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


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")

"""Tables of methods by name: ours, and those that other packages add by an entry point.

A line of such a table is "package.module:Class". Nothing is imported before it is asked for.
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
from keyhole.method_specs import Spec, parse_one, typed
from keyhole.settings_file import from_json, is_settings_file, method_in

Method = TypeVar("Method")


class Registry(Generic[Method]):
    """Methods of one kind by name.

    kind: what a user calls them. base: the class that all derive from. group: of entry points.
    ours: where ours are; they come first and cannot be replaced. default: the one among them that
    is meant when none is named. field: of a settings file that names one.
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
        """Every class by name: ours in the order of the table, then those of entry points."""
        return {name: self._load(name, place) for name, place in self._places().items()}

    def names(self) -> list[str]:
        """Every name in the same order; no method is imported."""
        return list(self._places())

    def make(
        self, method: Method | str | Path | None, settings: Mapping[str, Any] | None = None
    ) -> Method:
        """A method from itself, from its name, or the default from None.

        Settings may stand behind the name, "delta:token_budget=512", and beside it; a settings file
        stands for a name with settings. What is given beside it comes first, then what is behind.
        UnknownNameError for a name or setting that is not there; ConfigError for one that cannot be
        loaded, for a file that is wrong, and for settings beside an object.
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
        # Only this one is loaded: a broken package of others harms nobody who does not use it.
        cls: Any = self._load(name, places[name])
        fields = dataclasses.fields(cls)
        given = typed(Spec(name, spec.settings), self._kind, fields) | dict(settings or {})
        if stored is not None:
            given = from_json(spec.name, cls, f"{self._kind} {name}", stored) | given
        made: Method = from_settings(cls, f"{self._kind} {name}", given)
        return made

    def canonical(self, name: str) -> str:
        """The name in the table for DELTA, Tidal-Decode and the like; what is not there stays."""
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
        except Exception as error:  # a module of others may fail in its own manner while it loads
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

"""The parameters of a tool, for formats that write text as it is and any other value as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Where a schema has those that `$ref` names.
_DEFINITIONS = ("$defs", "definitions")
#: Keywords of schemas that are written for objects and lists, also without a type.
_NESTED = {"properties", "items"}


def is_text(schema: Any, parameters: Mapping[str, Any]) -> bool:
    """Whether a parameter's value is written as it is: if it may be a string, or anything.

    parameters: the schema of all parameters, which has the definitions.
    """
    return _may_be_text(schema, parameters, set())


def choices(schema: Any, parameters: Mapping[str, Any]) -> list[str]:
    """The strings that a parameter may be; empty if others may be, too."""
    seen: set[Any] = set()
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        place = schema["$ref"]
        schema = None if place in seen else _defined(place, parameters)
        seen.add(place)
    found = schema.get("enum") if isinstance(schema, Mapping) else None
    return found if isinstance(found, list) and _all_text(found) else []


def with_definitions(schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's schema by itself, with the definitions that it may name."""
    return {name: parameters[name] for name in _DEFINITIONS if name in parameters} | {**schema}


def _may_be_text(schema: Any, parameters: Mapping[str, Any], seen: set[str]) -> bool:
    """seen: the names that were followed. Those that occur again change nothing."""
    if not isinstance(schema, Mapping):
        return True
    place = schema.get("$ref")
    if isinstance(place, str):
        is_new = place not in seen
        seen.add(place)
        return is_new and _may_be_text(_defined(place, parameters), parameters, seen)
    for name, combined in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if "type" not in schema and isinstance(parts := schema.get(name), list):
            return combined([_may_be_text(one, parameters, seen) for one in parts])
    return _is_said_text(schema)


def _is_said_text(schema: Mapping[str, Any]) -> bool:
    kind, values = schema.get("type"), schema.get("enum")
    if isinstance(kind, str | list):
        return "string" in ([kind] if isinstance(kind, str) else kind)
    if isinstance(values, list):
        return _all_text(values)
    if "const" in schema:
        return isinstance(schema["const"], str)
    return not _NESTED & schema.keys()


def _defined(place: str, parameters: Mapping[str, Any]) -> Any:
    """The schema of a name such as "#/$defs/City"; None if there is none."""
    found: Any = parameters
    for part in place.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _all_text(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, str) for value in values)

"""The parameters of a tool, for formats that write text as it is and any other value as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

#: The definition that is the schema of all parameters, where one of them stands by itself.
_WHOLE = "parameters"
#: Schemas within schemas that are followed; recursive ones have no end.
_DEEPEST = 8
#: Keywords of schemas that are written for objects and lists, also without a type.
_NESTED = {"properties", "items"}


def is_text(schema: Any, parameters: Mapping[str, Any]) -> bool:
    """Whether a parameter's value is written as it is: if it may be a string, or anything.

    parameters: the schema of all parameters, which has the definitions.
    """
    return _may_be_text(schema, parameters, set())


def members(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that has "properties" and "required": `parameters`, or the one that it names."""
    found = _resolved(parameters, parameters)
    return found if isinstance(found, Mapping) else {}


def texts(schema: Any, parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of which a text must meet one, without `$ref`, `anyOf` and the like.

    Those of other types are left out; an empty mapping is one that any text meets.
    """
    return _texts(schema, parameters, 0)


def choices(schema: Mapping[str, Any]) -> list[str] | None:
    """The strings that one of `texts` allows; None if it does not list them."""
    if isinstance(schema.get("const"), str):
        return [schema["const"]]
    values = schema.get("enum")
    if not isinstance(values, list):
        return None
    found = [value for value in values if value is not None]
    return found if _all_text(found) else None


def with_definitions(schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's schema by itself, with what it names of the schema of all parameters."""
    if "$ref" not in json.dumps(schema):
        return {**schema}
    return {**_moved(schema), "$defs": {_WHOLE: _moved(parameters)}}


def _moved(schema: Any) -> Any:
    """The schema with the names that it has once `parameters` is one of its definitions."""
    if isinstance(schema, Mapping):
        moved = {name: _moved(value) for name, value in schema.items()}
        place = schema.get("$ref")
        if isinstance(place, str) and (place == "#" or place.startswith("#/")):
            moved["$ref"] = f"#/$defs/{_WHOLE}{place[1:]}"
        return moved
    return [_moved(value) for value in schema] if isinstance(schema, list) else schema


def _resolved(schema: Any, parameters: Mapping[str, Any]) -> Any:
    """What a schema names, through several names if need be; None for names that go in circles."""
    seen: set[str] = set()
    while isinstance(schema, Mapping) and isinstance(place := schema.get("$ref"), str):
        schema = None if place in seen else _defined(place, parameters)
        seen.add(place)
    return schema


def _texts(schema: Any, parameters: Mapping[str, Any], depth: int) -> list[Mapping[str, Any]]:
    schema = _resolved(schema, parameters)
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return [{}]
    if "type" not in schema:
        for name in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(name), list):
                these = [one for one in parts if is_text(one, parameters)]
                return [found for one in these for found in _texts(one, parameters, depth + 1)]
        if isinstance(parts := schema.get("allOf"), list):
            merged: dict[str, Any] = {}
            for one in parts:
                found = _texts(one, parameters, depth + 1)
                merged |= found[0] if len(found) == 1 else {}
            return [merged]
    return [schema]


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
    for part in place.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _all_text(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, str) for value in values)

"""A file with values for flags, TOML or YAML: `--config FILE`, or KEYHOLE_CONFIG.

    model = "Qwen/Qwen3-4B"         # model, device, dtype and store: of every command that has them

    [generate]                      # of one command; [documents.ask] for an action
    policy = "delta:token_budget=512"
    max_tokens = 100

A file whose name ends with .yaml or .yml is YAML of the same form. A method may be written with its
settings as a table: `policy = {name = "delta", token_budget = 512}`. Flags that are given come
before the file.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keyhole.errors import ConfigError, UnknownNameError

_FLAG, _VARIABLE = "--config", "KEYHOLE_CONFIG"
_SHARED = ("model", "device", "dtype", "store")
#: Flags that name a method, with its settings behind the name.
_METHODS = ("policy", "reuse")


def read(given: Sequence[str]) -> dict[str, Any]:
    """The file that a command line or the environment names; nothing if none is named."""
    path, flag = os.environ.get(_VARIABLE), _VARIABLE
    for here, after in zip(given, [*given, ""][1:], strict=True):
        if here == _FLAG or here.startswith(f"{_FLAG}="):
            path, flag = (after if here == _FLAG else here.partition("=")[2]), _FLAG
    if not path:
        return {}
    try:
        found = _parsed(Path(path))
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{flag} {path!r} cannot be read: {said}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{flag} {path!r} must have names and values, not a {_kind(found)}")
    for name, value in found.items():
        if not isinstance(name, str):
            raise ConfigError(f"{flag} {path!r}: {name!r} must be the name of a flag or a command")
        if not isinstance(value, Mapping) and name not in _SHARED:
            raise ConfigError(
                f"{flag} {path!r}: {name} must be in the table of a command, such as [generate]; "
                f"alone stand {', '.join(_SHARED)}"
            )
    return dict(found)


def _parsed(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".yaml", ".yml"):
        return tomllib.loads(text)
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _kind(found: object) -> str:
    return "list" if isinstance(found, list) else type(found).__name__


def apply(parser: argparse.ArgumentParser, config: Mapping[str, Any]) -> None:
    """Makes what the file says of a command the defaults of its flags."""
    own: Any = config
    for name in parser.prog.split()[1:]:
        own = own.get(name, {})
        if not isinstance(own, Mapping):
            raise ConfigError(f"{name} in the config file must be a table, [{name}]")
    actions = {
        action.dest: action
        for action in parser._actions
        if action.option_strings and action.dest not in ("help", "debug", "config")
    }
    shared = {name: config[name] for name in _SHARED if name in config and name in actions}
    for given, value in {**shared, **own}.items():
        name = given.replace("-", "_")
        if value is None:  # YAML's empty value: as if the line were not there
            continue
        if isinstance(value, Mapping) and name not in actions:  # of an action
            continue
        if name not in actions:
            raise UnknownNameError(f"flag of {parser.prog} in the config file", given, actions)
        parser.set_defaults(**{name: _value(actions[name], given, value)})


def _value(action: argparse.Action, name: str, value: Any) -> Any:
    """What the flag would have given: most are text until they are read as settings."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} {value!r} in the config file must be true or false")
        return str(value) if isinstance(action.const, str) else value
    if isinstance(action, argparse._AppendAction) or action.nargs == "+":
        if isinstance(value, Mapping):  # of numbers by token id
            return [f"{key}={one}" for key, one in value.items()]
        return [str(one) for one in (value if isinstance(value, list) else [value])]
    if action.dest in _METHODS and isinstance(value, Mapping):
        return _method(name, value)
    if isinstance(value, Mapping):
        raise ConfigError(f"{name} {dict(value)!r} in the config file must be one value")
    if isinstance(value, list):
        return ",".join(map(str, value))
    return action.type(str(value)) if callable(action.type) else str(value)


def _method(flag: str, given: Mapping[str, Any]) -> str:
    """NAME:SETTING=VALUE,SETTING=VALUE from a table with "name"."""
    settings = dict(given)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{flag} {dict(given)!r} in the config file must have a name")
    shown = ",".join(f"{key}={_shown(value)}" for key, value in settings.items())
    return f"{name}:{shown}" if shown else name


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Flags derived from settings: name, type, default and help come from the dataclass field."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keyhole
from keyhole.cli import show
from keyhole.config import EngineConfig, SamplingParams, help_of, parse_bytes
from keyhole.errors import ConfigError
from keyhole.policy import make_policy, policies
from keyhole.policy.base import Policy

if TYPE_CHECKING:
    from keyhole.engine.llm import LLM
    from keyhole.models.loading import Model

#: How to read the text of a flag, by the type of its field; None is the flag not given.
_BY_TYPE: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda text: text == "True",
    "tuple[int, ...]": lambda text: tuple(int(part) for part in text.split(",") if part.strip()),
    "Names": lambda text: tuple(part.strip() for part in text.split(",") if part.strip()),
}
#: Fields whose text says more than their type.
_READERS: dict[str, Callable[[str], Any]] = {"memory": parse_bytes}
_METAVARS = {"int": "N", "float": "X", "tuple[int, ...]": "N,N", "Names": "NAME,NAME"}
_RIGHT = {"int": "a whole number", "float": "a number"}


def add_model(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """MODEL or --model, --device and --dtype."""
    text = "folder or hub id; without it the bundled model"
    if positional:
        parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    else:
        parser.add_argument("--model", metavar="MODEL", help=text)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:0")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")


def add_settings(
    parser: argparse.ArgumentParser, cls: type[Any], title: str, only: Sequence[str] = ()
) -> None:
    """A flag for every field of a settings class, or for some."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(cls):
        if not only or field.name in only:
            _add_field(group, field)


def settings_of(arguments: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """The settings among the arguments that were given, in the types of their fields."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given = {name: getattr(arguments, name, None) for name in fields}
    return {name: _read(fields[name], text) for name, text in given.items() if text is not None}


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """The SamplingParams among the arguments."""
    return SamplingParams(**settings_of(arguments, SamplingParams))


def add_policy(parser: argparse.ArgumentParser) -> None:
    """--policy, and a flag for every setting of any policy in the table."""
    table = policies()
    group = parser.add_argument_group("policy: what a decode step reads")
    group.add_argument("--policy", default="full", metavar="NAME", help=", ".join(table))
    for name, owners in _policy_fields(table).items():
        text = _joined_help(owners).replace("%", "%%")
        group.add_argument(_flag(name), metavar=_metavar(owners[0][1]), help=text)


def policy_of(arguments: argparse.Namespace) -> Policy:
    """The policy that the arguments describe; a setting that it does not have is refused."""
    table = policies()
    cls = table.get(arguments.policy)
    own = {field.name: field for field in dataclasses.fields(cls)} if cls else {}
    given = {name: getattr(arguments, name) for name in _policy_fields(table)}
    settings = {
        name: _read(own[name], value) if name in own else value
        for name, value in given.items()
        if value is not None
    }
    return make_policy(arguments.policy, settings)


def load_model(arguments: argparse.Namespace) -> Model:
    """The model that the arguments name."""
    quiet()
    from keyhole.models.loading import load

    return load(arguments.model or keyhole.tiny(), arguments.device, arguments.dtype)


def make_llm(arguments: argparse.Namespace) -> LLM:
    """The model, policy and engine that the arguments describe; settings are checked first."""
    policy = policy_of(arguments)
    settings = settings_of(arguments, EngineConfig)
    model = load_model(arguments)
    from keyhole.engine.llm import LLM

    return LLM(model, policy=policy, **settings)


def quiet() -> None:
    """No progress bars of libraries where nobody watches them."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from transformers.utils import logging

        logging.disable_progress_bar()


def _policy_fields(
    table: dict[str, type[Policy]],
) -> dict[str, list[tuple[str, dataclasses.Field[Any]]]]:
    """Every setting of any policy, with the policies that have it."""
    fields: dict[str, list[tuple[str, dataclasses.Field[Any]]]] = {}
    for policy, cls in table.items():
        for field in dataclasses.fields(cls):
            fields.setdefault(field.name, []).append((policy, field))
    return fields


def _add_field(group: Any, field: dataclasses.Field[Any]) -> None:
    """A flag whose value stays text until `settings_of`; absent is None."""
    flag, text = _flag(field.name), _help(field).replace("%", "%%")
    if field.type == "bool":
        flag = _flag("no_" + field.name) if field.default else flag
        text = f"turn this off: {text}" if field.default else text
        group.add_argument(
            flag, dest=field.name, action="store_const", const=str(not field.default), help=text
        )
    elif field.type == "tuple[str, ...]":
        text += "; may be given several times"
        group.add_argument(flag, dest=field.name, metavar="TEXT", action="append", help=text)
    else:
        group.add_argument(flag, dest=field.name, metavar=_metavar(field), help=text)


def _help(field: dataclasses.Field[Any]) -> str:
    return _with_default(help_of(field), field)


def _with_default(text: str, field: dataclasses.Field[Any]) -> str:
    """The help with the default after it; what None means is said by the help itself."""
    text = text.replace("None: ", "default: ")
    plain = field.default in (None, ()) or isinstance(field.default, bool)
    return text if plain else f"{text}; default: {show.setting(field.default)}"


def _joined_help(owners: list[tuple[str, dataclasses.Field[Any]]]) -> str:
    """What a setting means to each policy that has it; a default that all share comes last."""
    shared = len({field.default for _, field in owners}) == 1
    meanings: dict[str, list[str]] = {}
    for policy, field in owners:
        meanings.setdefault(help_of(field) if shared else _help(field), []).append(policy)
    text = "; ".join(f"{', '.join(who)}: {what}" for what, who in meanings.items())
    return _with_default(text, owners[0][1]) if shared else text


def _metavar(field: dataclasses.Field[Any]) -> str:
    return "SIZE" if field.name in _READERS else _METAVARS.get(_kind(field), "TEXT")


def _kind(field: dataclasses.Field[Any]) -> str:
    return str(field.type).removesuffix(" | None")


def _read(field: dataclasses.Field[Any], text: Any) -> Any:
    """The value of a field from the text of its flag."""
    kind = _kind(field)
    if not isinstance(text, str):  # repeated texts
        return tuple(text)
    try:
        return _READERS.get(field.name, _BY_TYPE[kind])(text)
    except ConfigError:
        raise
    except ValueError as error:
        right = _RIGHT.get(kind, "numbers such as 0,1")
        raise ConfigError(f"{_flag(field.name)} {text!r} must be {right}") from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

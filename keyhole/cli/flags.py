"""Flags derived from settings: name, type, default and help come from the dataclass field."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keyhole.cli import show
from keyhole.config import (
    EngineConfig,
    SamplingParams,
    help_of,
    is_flag,
    is_size,
    kind_of,
    read_setting,
)
from keyhole.models.bundled import TINY, is_tiny
from keyhole.policy import make_policy, policies
from keyhole.policy.base import Policy
from keyhole.reuse import make_reuse, reuses
from keyhole.reuse.base import Reuse
from keyhole.settings_file import method_name, require_depth

if TYPE_CHECKING:
    from keyhole.engine.llm import LLM
    from keyhole.models.loading import Model

#: Classes of methods by name, and their settings, each with the methods that have it.
_Table = Mapping[str, type[Any]]
_Fields = dict[str, list[tuple[str, dataclasses.Field[Any]]]]

#: Before the name of a setting that is for the reuse method alone.
_REUSE = "reuse_"
_METAVARS = {
    "int": "N",
    "float": "X",
    "tuple[int, ...]": "N,N",
    "Names": "NAME,NAME",
    "Budgets": "N,1/N",
}


def add_model(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """MODEL or --model, --device and --dtype."""
    text = "folder, hub id, or tiny, the bundled demonstration model; default: tiny"
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
        if is_flag(field) and (not only or field.name in only):
            _add_field(group, field)


def settings_of(arguments: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """The settings among the arguments that were given, in the types of their fields."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given = {name: getattr(arguments, name, None) for name in fields}
    return {
        name: read_setting(fields[name], text, _flag(name))
        for name, text in given.items()
        if text is not None
    }


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """The SamplingParams among the arguments."""
    return SamplingParams(**settings_of(arguments, SamplingParams))


def add_policy(parser: argparse.ArgumentParser) -> None:
    """--policy, and a flag for every setting of any policy in the table."""
    table = policies()
    group = parser.add_argument_group("policy: what a decode step reads")
    text = f"{', '.join(table)}; or a settings file, NAME.json"
    group.add_argument("--policy", default="full", metavar="NAME", help=text)
    for name, owners in _fields_of(table).items():
        _add_shared(group, name, owners)


def policy_of(arguments: argparse.Namespace) -> Policy:
    """The policy that the arguments describe; a setting that it does not have is refused."""
    table = policies()
    cls, other = table.get(method_name(arguments.policy, "policy")), None
    if "reuse" in arguments:
        other = reuses().get(method_name(arguments.reuse, "reuse"))
    return make_policy(arguments.policy, _given(arguments, _fields_of(table), cls, other))


def add_reuse(parser: argparse.ArgumentParser) -> None:
    """--reuse, and a flag for every setting of any reuse method in the table.

    After `add_policy`, a flag that policies have too is for both, and --reuse-NAME for the reuse
    method alone.
    """
    table = reuses()
    group = parser.add_argument_group("reuse: what a prompt keeps and computes of documents")
    text = f"{', '.join(table)}; or a settings file, NAME.json"
    group.add_argument("--reuse", default="sam_kv", metavar="NAME", help=text)
    for name, owners in _fields_of(table).items():
        both = parser._option_string_actions.get(_flag(name))
        if both is None:
            _add_shared(group, name, owners)
            continue
        both.help = f"{both.help}; {_joined_help(owners).replace('%', '%%')}"
        text = f"{_flag(name)} for the reuse method alone"
        group.add_argument(_flag(_REUSE + name), metavar=_metavar(owners[0][1]), help=text)


def reuse_of(arguments: argparse.Namespace) -> Reuse:
    """The reuse method that the arguments describe; a setting that it does not have is refused."""
    table = reuses()
    cls, other = table.get(method_name(arguments.reuse, "reuse")), None
    if "policy" in arguments:
        other = policies().get(method_name(arguments.policy, "policy"))
    settings = _given(arguments, _fields_of(table), cls, other, _REUSE)
    return make_reuse(arguments.reuse, settings)


def load_model(arguments: argparse.Namespace) -> Model:
    """The model that the arguments name."""
    quiet()
    from keyhole.models.loading import load

    name = TINY if arguments.model is None else arguments.model
    return load(name, arguments.device, arguments.dtype)


def is_bundled(model: str | None) -> bool:
    """Whether a command's MODEL is the one that comes with Keyhole, which is its default."""
    return model is None or is_tiny(model)


def make_llm(arguments: argparse.Namespace) -> LLM:
    """The model, policy and engine that the arguments describe; settings are checked first."""
    policy = policy_of(arguments)
    settings = settings_of(arguments, EngineConfig)
    model = load_model(arguments)
    require_depth(arguments.policy, model.geometry(EngineConfig.page_size).num_layers)
    from keyhole.engine.llm import LLM

    return LLM(model, policy=policy, **settings)


def quiet() -> None:
    """No progress bars of libraries where nobody watches them."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from transformers.utils import logging

        logging.disable_progress_bar()


def _fields_of(table: _Table) -> _Fields:
    """Every setting of any method, with the methods that have it."""
    fields: _Fields = {}
    for method, cls in table.items():
        for field in dataclasses.fields(cls):
            fields.setdefault(field.name, []).append((method, field))
    return fields


def _given(
    arguments: argparse.Namespace,
    names: Iterable[str],
    cls: type[Any] | None,
    other: type[Any] | None,
    prefix: str | None = None,
) -> dict[str, Any]:
    """The settings of a method among the arguments, in the types of its fields where it has them.

    names: of all settings of its kind. What only the method of the `other` kind has is left to it.
    prefix: of flags that are for this kind alone.
    """
    own, theirs = ({f.name: f for f in dataclasses.fields(c)} if c else {} for c in (cls, other))
    settings: dict[str, Any] = {}
    for name in names:
        called = f"{prefix}{name}"
        alone = None if prefix is None else getattr(arguments, called, None)
        value = getattr(arguments, name) if alone is None else alone
        if value is None or (alone is None and name in theirs and name not in own):
            continue
        flag = _flag(name if alone is None else called)
        settings[name] = read_setting(own[name], value, flag) if name in own else value
    return settings


def _add_shared(group: Any, name: str, owners: list[tuple[str, dataclasses.Field[Any]]]) -> None:
    """A flag for a setting that several methods may have."""
    field, text = owners[0][1], _joined_help(owners)
    if field.type == "bool":
        _add_switch(group, name, field, text)
    else:
        group.add_argument(_flag(name), metavar=_metavar(field), help=text.replace("%", "%%"))


def _add_field(group: Any, field: dataclasses.Field[Any]) -> None:
    """A flag whose value stays text until `settings_of`; absent is None."""
    flag, text = _flag(field.name), _help(field)
    if field.type == "bool":
        _add_switch(group, field.name, field, text)
        return
    text = text.replace("%", "%%")
    if field.type == "tuple[str, ...]":
        text += "; may be given several times"
        group.add_argument(flag, dest=field.name, metavar="TEXT", action="append", help=text)
    else:
        group.add_argument(flag, dest=field.name, metavar=_metavar(field), help=text)


def _add_switch(group: Any, name: str, field: dataclasses.Field[Any], text: str) -> None:
    """A flag without a value, which says the opposite of the default."""
    flag = _flag("no_" + name) if field.default else _flag(name)
    text = f"turn this off: {text}" if field.default else text
    const = str(not field.default)
    group.add_argument(
        flag, dest=name, action="store_const", const=const, help=text.replace("%", "%%")
    )


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
    return "SIZE" if is_size(field) else _METAVARS.get(kind_of(field), "TEXT")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

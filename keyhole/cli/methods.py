"""Lists the sparse-attention policies and reuse methods, or tells all about one of them.

With NAME: the idea, the paper, the cost, when to use it, and the settings that may stand behind its
name in `--policy` or `--reuse`. docs/methods.md has the differences from each paper besides.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from keyhole.cli.common import show
from keyhole.config import help_of
from keyhole.errors import UnknownNameError
from keyhole.policies import available_policies, policy_name
from keyhole.reuse import available_reuse_methods, reuse_name

_WIDTH = 96
#: Paragraphs of a docstring that are for docs/methods.md.
_LEFT_OUT = ("Differences ", "The numbers: ")
_KINDS = {
    "policy": "--policy: what a decode step reads",
    "reuse": "--reuse: what a prompt keeps of stored documents",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole methods`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a policy or reuse method")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table, or one method."""
    tables: dict[str, Mapping[str, type[Any]]] = {
        "policy": available_policies(),
        "reuse": available_reuse_methods(),
    }
    named = None if arguments.name is None else _find(arguments.name, tables)
    if named is not None:
        kind, name = named
        tables = {kind: {name: tables[kind][name]}}
    if arguments.json:
        found = [about(kind, *pair) for kind, table in tables.items() for pair in table.items()]
        print(show.to_json({"methods": found}))
    elif named is not None:
        kind, name = named
        print(_text(kind, name, tables[kind][name]))
    else:
        width = max(len(name) for table in tables.values() for name in table)
        for kind, table in tables.items():
            print(f"{_KINDS[kind]}\n")
            for name, cls in table.items():
                print(_wrapped(f"{name:{width}}  {summary(cls)}", width + 4))
            print()
        print("`keyhole methods NAME` tells all about one of them")
    return 0


def about(kind: str, name: str, cls: type[Any]) -> dict[str, Any]:
    """A method for JSON: what it is, and its settings with their defaults."""
    settings = [
        {"name": field.name, "default": field.default, "type": str(field.type), "help": text}
        for field, text in settings_of(cls)
    ]
    return {
        "name": name,
        "kind": kind,
        "summary": summary(cls),
        "about": "\n\n".join(paragraphs(cls)),
        "settings": settings,
    }


def summary(cls: type[Any]) -> str:
    """The first paragraph of the class's docstring in one line."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())


def description(cls: type[Any]) -> str:
    """The description of a method: in its class if the module has several, else of the module."""
    own = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[2]
    return own or inspect.getdoc(sys.modules[cls.__module__]) or ""


def paragraphs(cls: type[Any]) -> list[str]:
    """The description of a method without the differences from the paper."""
    return [part for part in description(cls).split("\n\n") if not part.startswith(_LEFT_OUT)]


def settings_of(cls: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], str]]:
    """Every setting of a method with its help."""
    return ((field, help_of(field)) for field in dataclasses.fields(cls))


def _find(name: str, tables: Mapping[str, Mapping[str, type[Any]]]) -> tuple[str, str]:
    for kind, known in (("policy", policy_name(name)), ("reuse", reuse_name(name))):
        if known in tables[kind]:
            return kind, known
    raise UnknownNameError("method", name, [*tables["policy"], *tables["reuse"]])


def _text(kind: str, name: str, cls: type[Any]) -> str:
    parts = ["\n\n".join(paragraphs(cls))]
    rows = [
        _wrapped(f"  {field.name} ({show.setting(field.default)}): {text}", 6)
        for field, text in settings_of(cls)
    ]
    if rows:
        first = dataclasses.fields(cls)[0]
        value = show.setting(first.default)
        parts.append("\n".join([f"Settings, as in --{kind} {name}:{first.name}={value}", *rows]))
    return "\n\n".join(parts)


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=" " * indent)

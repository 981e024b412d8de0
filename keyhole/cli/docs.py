"""Writes the documents that the program itself knows: `python -m keyhole.cli.docs`.

    docs/cli.md       every command with its help
    docs/methods.md   every policy and reuse method: the idea, the cost, the differences from the
                      paper, the settings

A test compares them with `render()`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keyhole.cli import build_parser, show
from keyhole.cli.parser import Formatter, Parser
from keyhole.config import help_of
from keyhole.policy import policies
from keyhole.reuse import reuses

_WIDTH = 100
_WRITTEN_BY = "<!-- Written by `make docs`; edit the program instead. -->"


def render() -> dict[str, str]:
    """Text of each generated document, by its path from the root of the repository."""
    return {"docs/cli.md": _commands(), "docs/methods.md": _methods()}


def main() -> None:
    """Writes them below the repository that this file is in."""
    root = Path(__file__).parents[2]
    for name, text in render().items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
        print(f"written: {name}")


def _commands() -> str:
    parser = build_parser()
    parts = [
        f"{_WRITTEN_BY}\n\n# Commands",
        "Errors are one line on stderr and exit status 2; `--debug` after a command shows where\n"
        "they came from. `--json` prints one object with the names of the Python interface.",
        _help(parser),
    ]
    for command in parser.commands().values():
        parts.append(_section(command, "##"))
        parts += [_section(action, "###") for action in command.commands().values()]
    return "\n\n".join(parts) + "\n"


def _section(command: Parser, mark: str) -> str:
    return f"{mark} {command.prog}\n\n{_help(command)}"


def _help(parser: argparse.ArgumentParser) -> str:
    # The width of a page, not of the terminal that `make docs` happens to run in.
    parser.formatter_class = functools.partial(Formatter, width=_WIDTH)
    return f"```\n{parser.format_help().rstrip()}\n```"


def _methods() -> str:
    parts = [
        f"{_WRITTEN_BY}\n\n# Methods",
        "A policy says what a decode step attends to. Prefill is exact under every policy, and\n"
        "with a budget of at least the length every policy is full attention.",
        *_table(policies(), "policy", "what a step reads"),
        "# Reuse methods",
        "A reuse method says what a prompt keeps of stored documents, and what it computes again\n"
        "in view of the other documents (`LLM.ask`, `keyhole documents ask`). The answer is then\n"
        "decoded under any policy.",
        *_table(reuses(), "reuse method", "what a prompt keeps"),
    ]
    return "\n\n".join(parts) + "\n"


def _table(classes: Mapping[str, type[Any]], kind: str, what: str) -> list[str]:
    """A table of our methods of a kind, and a section of each."""
    ours = {name: cls for name, cls in classes.items() if cls.__module__.startswith("keyhole.")}
    rows = [
        f"| [`{name}`](#{name}) | `{cls.__name__}` | {cls.__doc__} |" for name, cls in ours.items()
    ]
    heads = f"| {kind} | class | {what} |\n|---|---|---|"
    return ["\n".join([heads, *rows]), *(_method(name, cls) for name, cls in ours.items())]


def _method(name: str, cls: type[Any]) -> str:
    """Module docstring and settings of one method."""
    about = inspect.getdoc(sys.modules[cls.__module__]) or ""
    parts = [f"## {name}", about]
    fields = dataclasses.fields(cls)
    if fields:
        rows = [
            f"| `{field.name}` | `{show.setting(field.default)}` | {help_of(field)} |"
            for field in fields
        ]
        parts.append("\n".join(["| setting | default | |\n|---|---|---|", *rows]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()

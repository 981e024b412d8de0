"""An argparse parser with Keyhole's manners: one line per error, and the nearest name offered."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Sequence
from typing import Any, NoReturn

from keyhole.errors import ConfigError, UnknownNameError


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Docstrings as they stand, defaults where there are any, flags and help in two columns."""

    def __init__(self, prog: str, **sizes: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30, **sizes})

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        plain = action.default in (None, False, True, argparse.SUPPRESS)
        return text if plain else f"{text}; default: %(default)s"

    def _iter_indented_subactions(
        self, action: argparse.Action
    ) -> Generator[argparse.Action, None, None]:
        # Indented, the longest command would not fit its column.
        yield from getattr(action, "_get_subactions", list)()


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def __init__(self, **options: Any) -> None:
        # A shortened flag would change its meaning when another flag is added.
        super().__init__(**{"formatter_class": Formatter, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Turns argparse's message into an error like all others."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def command(self, name: str) -> argparse.ArgumentParser:
        """The parser of a command."""
        return self.commands()[name]

    def commands(self) -> dict[str, argparse.ArgumentParser]:
        """The parsers of all commands by name."""
        found = next(a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        return dict(found.choices)


def check_leftover(parser: Parser, command: str, leftover: Sequence[str]) -> None:
    """Refuses what no argument took, with the nearest flag."""
    if not leftover:
        return
    flag = leftover[0].partition("=")[0]
    if not flag.startswith("--"):
        raise ConfigError(f"unexpected argument {leftover[0]!r}; see `keyhole {command} --help`")
    known = parser.command(command)._option_string_actions
    raise UnknownNameError(f"option of {command}", flag, [f for f in known if f.startswith("--")])


def usage(command: argparse.ArgumentParser) -> str:
    """The usage of a command without the list of its flags, which follows anyway."""
    places = [
        str(action.metavar) if action.required else f"[{action.metavar}]"
        for action in command._get_positional_actions()
    ]
    return " ".join([command.prog, *places, "[options]"])

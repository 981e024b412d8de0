"""An argparse parser with Keyhole's manners: one line per error, and the nearest name offered."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

from keyhole.errors import ConfigError, UnknownNameError


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Docstrings as they stand, defaults where there are any, flags and help in two columns."""

    def __init__(self, prog: str, **sizes: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30, **sizes})

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        plain = action.default in (None, False, True, "", [], argparse.SUPPRESS)
        return text if plain else f"{text}; default: %(default)s"

    def _iter_indented_subactions(
        self, action: argparse.Action
    ) -> Generator[argparse.Action, None, None]:
        # Indented, the longest command would not fit its column.
        yield from getattr(action, "_get_subactions", list)()


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit.

    fill: adds the arguments once they are needed, so that the others pay nothing for them.
    """

    def __init__(self, *, fill: Callable[[Parser], None] | None = None, **options: Any) -> None:
        # A shortened flag would change its meaning when another flag is added.
        super().__init__(**{"formatter_class": Formatter, "allow_abbrev": False, **options})
        self._fill = fill

    def error(self, message: str) -> NoReturn:
        """Turns argparse's message into an error like all others."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def filled(self) -> Parser:
        """This parser with all its arguments."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        return self

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """As argparse does it; leftovers belong to the parser that found them."""
        return super(Parser, self.filled()).parse_known_args(*given, **named)

    def format_help(self) -> str:
        """As argparse does it."""
        return super(Parser, self.filled()).format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            raise UnknownNameError(action.dest, str(value), action.choices)
        super()._check_value(action, value)

    def commands(self) -> dict[str, Parser]:
        """The parsers of all commands by name; none for one without."""
        found = [a for a in self.filled()._actions if isinstance(a, argparse._SubParsersAction)]
        return dict(found[0].choices) if found else {}


def add_command(commands: Any, name: str, summary: str, module: Any, run: str = "run") -> None:
    """A command from a module with `add_arguments` and `run`.

    run: what the arguments call the latter.
    """

    def fill(parser: Parser) -> None:
        module.add_arguments(parser)
        parser.add_argument("--debug", action="store_true", help="show where an error came from")
        parser.set_defaults(parser=parser, **{run: module.run})
        parser.usage = _usage(parser)

    commands.add_parser(name, help=summary, description=module.__doc__, fill=fill)


def check_leftover(parser: Parser, leftover: Sequence[str]) -> None:
    """Refuses what no argument of a command took, with the nearest flag."""
    if not leftover:
        return
    flag = leftover[0].partition("=")[0]
    if not flag.startswith("--"):
        raise ConfigError(f"unexpected argument {leftover[0]!r}; see `{parser.prog} --help`")
    command = parser.prog.partition(" ")[2]
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    raise UnknownNameError(f"option of {command}", flag, known)


def _usage(command: argparse.ArgumentParser) -> str:
    """The usage of a command without the list of its flags, which follows anyway."""
    places = []
    for action in command._get_positional_actions():
        many = f"{action.metavar} ..." if action.nargs in ("+", "*") else str(action.metavar)
        optional = action.nargs in ("?", "*")
        places.append(f"[{many}]" if optional else many)
    return " ".join([command.prog, *places, "[options]"])

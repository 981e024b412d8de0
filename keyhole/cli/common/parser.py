"""An argparse parser with one line per error, the nearest name offered, and values from a file.

`--config FILE.toml`, or KEYHOLE_CONFIG in the environment, names a TOML file with values for flags:

    model = "Qwen/Qwen3-4B"         # model, device, dtype and store: of every command that has them

    [generate]                      # of one command; [documents.ask] for an action
    policy = "delta:token_budget=512"
    max_tokens = 100

Flags that are given take precedence over the file.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from keyhole.errors import ConfigError, UnknownNameError
from keyhole.policies import available_policies
from keyhole.reuse import available_reuse_methods

_FLAG, _VARIABLE = "--config", "KEYHOLE_CONFIG"
_SHARED = ("model", "device", "dtype", "store")
#: Flags whose value is a method, with settings after its name.
_METHODS = ("policy", "reuse")


def read_config(given: Sequence[str]) -> dict[str, Any]:
    """The values of the configuration file that the command line or the environment names; {} if
    none is named.
    """
    path, flag = os.environ.get(_VARIABLE), _VARIABLE
    for here, after in zip(given, [*given, ""][1:], strict=True):
        if here == _FLAG or here.startswith(f"{_FLAG}="):
            path, flag = (after if here == _FLAG else here.partition("=")[2]), _FLAG
    if not path:
        return {}
    try:
        found = _parsed(Path(path))
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise ConfigError(f"{flag} {path!r} cannot be read: {reason}") from error
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ConfigError(
            f"{flag} {path!r} must be a table of commands and flags with their values"
        )
    for name, value in found.items():
        if not isinstance(value, Mapping) and name not in _SHARED:
            raise ConfigError(
                f"{flag} {path!r}: {name} must be in the table of a command, such as [generate]; "
                f"only {', '.join(_SHARED)} can be outside a table"
            )
    return dict(found)


def _parsed(path: Path) -> Any:
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix not in (".yaml", ".yml"):
        return tomllib.loads(text)
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def apply_config(parser: argparse.ArgumentParser, config: Mapping[str, Any]) -> None:
    """Makes the values of a file for a command the defaults of its flags."""
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
        if value is None:  # an empty value in YAML counts as not given
            continue
        if isinstance(value, Mapping) and name not in actions:  # of an action
            continue
        if name not in actions:
            raise UnknownNameError(f"flag of {parser.prog} in the config file", given, actions)
        parser.set_defaults(**{name: _value(actions[name], given, value)})


def _value(action: argparse.Action, name: str, value: Any) -> Any:
    """The value as the flag would give it: mostly text, until it is read as a setting."""
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


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows docstrings unwrapped, defaults, and flags with their help in two columns."""

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
    """Raises ConfigError instead of printing the usage and exiting, as argparse does.

    fill: adds the arguments when they are needed, so that other commands do not pay for them.
    config: values for flags of this parser and its commands, from a file.
    """

    def __init__(
        self,
        *,
        fill: Callable[[Parser], None] | None = None,
        config: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        # A shortened flag would change its meaning when another flag is added.
        super().__init__(**{"formatter_class": Formatter, "allow_abbrev": False, **options})
        self._fill, self.config = fill, config

    def error(self, message: str) -> NoReturn:
        """Raises argparse's message as a ConfigError."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def filled(self) -> Parser:
        """This parser with all its arguments."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        return self

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """As in argparse; leftovers belong to the parser that found them."""
        return super(Parser, self.filled()).parse_known_args(*given, **named)

    def format_help(self) -> str:
        """As in argparse."""
        return super(Parser, self.filled()).format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            raise UnknownNameError(action.dest, str(value), action.choices)
        super()._check_value(action, value)

    def commands(self) -> dict[str, Parser]:
        """The parsers of the commands by name; empty if there are none."""
        found = [a for a in self.filled()._actions if isinstance(a, argparse._SubParsersAction)]
        return dict(found[0].choices) if found else {}


def add_command(
    commands: Any,
    name: str,
    summary: str,
    command: Any,
    config: Mapping[str, Any],
    run: str = "run",
) -> None:
    """Adds a command from a module or class with `add_arguments` and `run`.

    config: values for its flags. run: the name under which the arguments hold the command's `run`.
    """

    def fill(parser: Parser) -> None:
        command.add_arguments(parser)
        parser.add_argument(
            "--config",
            metavar="FILE",
            help="TOML or YAML file with values for flags; default: $KEYHOLE_CONFIG",
        )
        parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
        apply_config(parser, config)
        parser.set_defaults(parser=parser, **{run: command.run})
        parser.usage = _usage(parser)

    about = inspect.getdoc(command)
    commands.add_parser(name, help=summary, description=about, fill=fill, config=config)


def check_leftover(arguments: argparse.Namespace, leftover: Sequence[str]) -> None:
    """Refuses arguments that no command took, and suggests the nearest flag."""
    if not leftover:
        return
    flag = leftover[0].partition("=")[0]
    parser: Parser = arguments.parser
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    help_text = f"see `{parser.prog} --help`"
    if not flag.startswith("--"):
        model = "; a model is named by --model" if "--model" in known else ""
        raise ConfigError(f"unexpected argument {leftover[0]!r}{model}; {help_text}")
    name = flag.removeprefix("--").replace("-", "_")
    chosen = [vars(arguments).get("policy"), vars(arguments).get("reuse")]
    owners = [
        f"--{kind} {method}:{name}=..."
        for kind, table in (("policy", available_policies), ("reuse", available_reuse_methods))
        if kind in arguments  # loaded only for commands that have this flag
        for method, cls in sorted(table().items(), key=lambda one: one[0] not in chosen)
        if name in vars(cls)["__dataclass_fields__"]
    ]
    # Compared without the dashes, which would make all flags look similar.
    near = difflib.get_close_matches(flag[2:], [one[2:] for one in known], n=1)
    if near:
        hint = f"did you mean '--{near[0]}'?"
    elif owners:
        hint = f"settings follow a method's name: {owners[0]}"
    else:
        hint = help_text
    command = parser.prog.partition(" ")[2]
    raise ConfigError(f"unknown option of {command} {flag!r}; {hint}")


def _usage(command: argparse.ArgumentParser) -> str:
    """The usage of a command without its flags, which are listed below it anyway."""
    places = []
    for action in command._get_positional_actions():
        many = f"{action.metavar} ..." if action.nargs in ("+", "*") else str(action.metavar)
        optional = action.nargs in ("?", "*")
        places.append(f"[{many}]" if optional else many)
    return " ".join([command.prog, *places, "[options]"])

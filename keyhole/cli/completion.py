"""Prints a script that lets a shell complete commands, flags and the names of methods.

bash: keyhole completion bash > ~/.local/share/bash-completion/completions/keyhole
zsh:  keyhole completion zsh > ~/.zfunc/_keyhole, with ~/.zfunc in $fpath
fish: keyhole completion fish > ~/.config/fish/completions/keyhole.fish
"""

from __future__ import annotations

import argparse

from keyhole import cli
from keyhole.cli import bench
from keyhole.cli.common.parser import Parser
from keyhole.cli.eval import SUITES
from keyhole.errors import UnknownNameError
from keyhole.models.checkpoint import ITEMSIZES
from keyhole.policies import available_policies
from keyhole.reuse import reuse_names

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole completion`."""
    parser.add_argument("shell", metavar="SHELL", help=", ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    import shtab

    if arguments.shell not in SHELLS:
        raise UnknownNameError("shell", arguments.shell, SHELLS)
    print(shtab.complete(_filled(cli.build_parser()), arguments.shell))
    return 0


def _filled(parser: Parser) -> Parser:
    """The parser with the arguments of all commands; help texts in their final form."""
    for command in parser.commands().values():
        _filled(command)
        for action in command._actions:
            # Only here: a value may also have settings behind a name, or be a file.
            action.choices = _names(command.prog, action.dest) or action.choices
    return parser


def _names(prog: str, dest: str) -> list[str]:
    """What may stand at an argument of a command; nothing where there is no list of it."""
    policies = list(available_policies())
    if prog == "keyhole methods":
        return [*policies, *reuse_names()] if dest == "name" else []
    names = {
        "benchmark": list(bench.SETTINGS),
        "dtype": ["auto", *ITEMSIZES],
        "policy": policies,
        "reuse": reuse_names(),
        "shell": list(SHELLS),
        "suite": list(SUITES),
    }
    return names.get(dest, [])

"""Stores documents, each encoded once on its own by a model, and answers questions over them.

Stored documents survive restarts, and several processes may use them at once. A name that ends in
"/" means all documents below it: `--documents handbook/` for handbook/a.md and handbook/b.md.
"""

from __future__ import annotations

import argparse
from typing import Any

from keyhole.cli.common.parser import Parser, add_command
from keyhole.errors import ConfigError

#: Name and one line of help.
ACTIONS = {
    "add": "encode files and store them",
    "list": "list what is stored",
    "show": "describe a stored document, or draw what a question keeps of it",
    "remove": "remove documents",
    "verify": "find records that are damaged or of another model, and encode them again",
    "ask": "answer a question over stored documents",
}


def add_arguments(parser: Parser) -> None:
    """The actions of `keyhole documents`."""
    actions = parser.add_subparsers(dest="action", title="actions", metavar="ACTION", required=True)
    from keyhole.cli.documents import add, ask, manage

    commands: dict[str, Any] = {
        "add": add,
        "list": manage.List,
        "show": ask.Show,
        "remove": manage.Remove,
        "verify": manage.Verify,
        "ask": ask.Ask,
    }
    for name, summary in ACTIONS.items():
        add_command(actions, name, summary, commands[name], parser.config, run="run_action")


def run(arguments: argparse.Namespace) -> int:
    """Runs the action; only `add` creates a store."""
    from keyhole.cli.documents.manage import is_there

    if arguments.action not in ("add", "list") and not is_there(arguments):
        raise ConfigError(
            f"--store {arguments.store!r} is not a folder; `keyhole documents add` creates one"
        )
    return int(arguments.run_action(arguments))

"""Forgets documents, with what all models have stored of them. No model is loaded.

Nothing is removed if one of the names is unknown.
"""

from __future__ import annotations

import argparse

from keyhole.cli.common import show
from keyhole.cli.documents.store import add_store, expand, open_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole documents remove`."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="NAME/ is all documents below it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_store(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints what was removed."""
    store = open_store(arguments)
    names = list(dict.fromkeys(expand(arguments.names, (info.name for info in store.list()))))
    for name in names:
        store.info(name)
    for name in names:
        store.remove(name)
        if not arguments.json:
            print(f"removed: {name}")
    if arguments.json:
        print(show.to_json({"removed": names}))
    return 0

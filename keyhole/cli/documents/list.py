"""Lists what is stored. Without --model no model is loaded, and nothing is said of its records.

With it, tokens and blocks are as that model counts them, and `encoded` says whether it can answer
over a document at once; if not, `keyhole documents verify --repair` encodes it.
"""

from __future__ import annotations

import argparse
from datetime import datetime
from typing import TYPE_CHECKING

from keyhole.cli.common import flags, show
from keyhole.cli.documents.store import about, add_store, blocks, open_llm, open_store, place

if TYPE_CHECKING:
    from keyhole.documents.store import DocumentInfo

_HEADS = ("name", "tokens", "blocks", "size", "added", "used", "hits", "models", "pinned")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole documents list`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_store(parser)
    flags.add_model(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints a row per document."""
    asked = arguments.model is not None
    store = open_llm(arguments).documents.store if asked else open_store(arguments)
    infos, where = store.list(), place(arguments)
    if arguments.json:
        known = [about(info) | ({} if asked else {"encoded": None}) for info in infos]
        print(show.to_json({"place": where, "documents": known}))
        return 0
    if not infos:
        print(f"no documents at {where}; `keyhole documents add NAME FILE` stores one")
        return 0
    heads = (*_HEADS, "encoded") if asked else _HEADS
    rows = [[*_row(info), *([_yes(info.encoded)] if asked else [])] for info in infos]
    print(show.table(heads, rows))
    tokens = show.count(sum(info.tokens for info in infos), "token")
    size = show.bytes_text(sum(info.size_bytes for info in infos))
    print(f"{show.count(len(infos), 'document')}, {tokens}, {size} at {where}")
    return 0


def _row(info: DocumentInfo) -> list[str]:
    return [
        info.name,
        f"{info.tokens:,}",
        f"{blocks(info):,}",
        show.bytes_text(info.size_bytes),
        _time(info.created),
        _time(info.last_used) if info.hits else "never",
        f"{info.hits:,}",
        str(len(info.records)),
        _yes(info.pinned),
    ]


def _time(seconds: float) -> str:
    """In the time zone of this machine."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _yes(value: bool) -> str:
    return "yes" if value else "no"

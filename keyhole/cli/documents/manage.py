"""Lists, removes and verifies stored documents; and helpers of all actions."""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from keyhole.cli.common import flags, terminal
from keyhole.config import EngineConfig, bytes_text, parse_bytes
from keyhole.documents.source import local_folder, place_of
from keyhole.errors import ConfigError, KeyholeError, UnknownNameError

if TYPE_CHECKING:
    from keyhole.documents.store import DocumentInfo, DocumentStore, Problem
    from keyhole.engine.documents.library import Documents
    from keyhole.llm import LLM


# The fingerprint of a store that is opened without a model; no record has it.
_NO_MODEL = {"model": "none"}


class _OnUse(types.ModuleType):
    """A module in `sys.modules` that is imported when one of its attributes is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def add_store(parser: argparse.ArgumentParser) -> None:
    """--store."""
    parser.add_argument(
        "--store",
        metavar="PLACE",
        help="folder or URL of the documents; default: in the user's cache folder",
    )


def add_encoding(parser: argparse.ArgumentParser, adapter: str) -> None:
    """The flags of an action that encodes: store, model and memory. adapter: help of --adapter."""
    add_store(parser)
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help="largest size of the store, such as 20GiB; least recently used records are evicted, "
        "except pinned ones; default: no limit",
    )
    flags.add_model(parser)
    flags.add_adapters(parser)
    parser.add_argument("--adapter", metavar="NAME", help=adapter)
    flags.add_settings(parser, EngineConfig, "engine", ("memory", "kv_dtype"))


def open_llm(arguments: argparse.Namespace) -> LLM:
    """The model and engine that the arguments describe, with its documents."""
    limit = getattr(arguments, "limit", None)
    store = {
        "documents": place(arguments),
        "documents_limit": None if limit is None else parse_bytes(limit, "--limit"),
        "documents_check": getattr(arguments, "check", "open"),
    }
    return flags.make_llm(arguments, store)


def open_store(arguments: argparse.Namespace) -> DocumentStore:
    """The documents without a model; they count as not encoded. Torch is not loaded."""
    sys.modules.setdefault("torch", _OnUse("torch"))
    from keyhole.documents.store import DocumentStore

    return DocumentStore(place(arguments), _NO_MODEL)


def place(arguments: argparse.Namespace) -> str:
    """Where the documents are."""
    return place_of(arguments.store, "--store")


def is_there(arguments: argparse.Namespace) -> bool:
    """Whether the folder that --store names exists; of a URL the store itself tells.

    ConfigError if it names a file.
    """
    folder = None if arguments.store is None else local_folder(arguments.store)
    if folder is not None and folder.is_file():
        raise ConfigError(f"--store {arguments.store!r} is a file; it must be a folder or a URL")
    return folder is None or folder.is_dir()


def expand(given: Sequence[str], known: Iterable[str]) -> list[str]:
    """The names in order; one that ends in "/" is replaced by all names that begin with it, sorted.

    UnknownNameError if there are none; other names are not checked.
    """
    known = sorted(known)
    names: list[str] = []
    for name in given:
        below = [other for other in known if other.startswith(name.rstrip("/") + "/")]
        folders = {f"{other.rpartition('/')[0]}/" for other in known if "/" in other}
        if (name.endswith("/") and not below) or (name not in known and below and name[-1] != "/"):
            raise UnknownNameError("document", name, {*known, *folders})
        names += below if name.endswith("/") else [name]
    return names


def about(info: DocumentInfo) -> dict[str, Any]:
    """A document for JSON: the fields of `DocumentInfo`, and its blocks."""
    return {**vars(info), "blocks": blocks(info)}


def blocks(info: DocumentInfo) -> int:
    """Blocks of a document, the short last one included."""
    return -(-info.tokens // info.block_size)


def sentence(info: DocumentInfo) -> str:
    """A document in a line."""
    tokens = terminal.count(info.tokens, "token")
    parts = f"{terminal.count(blocks(info), 'block')} of {info.block_size}"
    return f"{info.name}: {tokens}, {parts}, {bytes_text(info.size_bytes)}"


_HEADS = ("name", "tokens", "blocks", "size", "added", "used", "hits", "models", "pinned")


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole documents list`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_store(parser)
    flags.add_model(parser, default="none")


def _run_list(arguments: argparse.Namespace) -> int:
    """Prints a row per document."""
    asked = arguments.model is not None
    infos, where = [], place(arguments)
    if is_there(arguments):  # opening a store creates its folder
        store = open_llm(arguments).documents.store if asked else open_store(arguments)
        infos = store.list()
    if arguments.json:
        known = [about(info) | ({} if asked else {"encoded": None}) for info in infos]
        print(terminal.to_json({"place": where, "documents": known}))
        return 0
    if not infos:
        print(f"no documents at {where}; `keyhole documents add NAME FILE` stores one")
        return 0
    heads = (*_HEADS, "encoded") if asked else _HEADS
    rows = [[*_row(info), *([_yes(info.encoded)] if asked else [])] for info in infos]
    print(terminal.table(heads, rows))
    tokens = terminal.count(sum(info.tokens for info in infos), "token")
    size = bytes_text(sum(info.size_bytes for info in infos))
    print(f"{terminal.count(len(infos), 'document')}, {tokens}, {size} at {where}")
    return 0


def _row(info: DocumentInfo) -> list[str]:
    return [
        info.name,
        f"{info.tokens:,}",
        f"{blocks(info):,}",
        bytes_text(info.size_bytes),
        _minute(info.created),
        _minute(info.last_used) if info.hits else "never",
        f"{info.hits:,}",
        str(len(info.records)),
        _yes(info.pinned),
    ]


def _minute(seconds: float) -> str:
    """In the time zone of this machine."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _add_remove_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole documents remove`."""
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="NAME/ means all documents below it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_store(parser)


def _run_remove(arguments: argparse.Namespace) -> int:
    """Prints the removed names."""
    store = open_store(arguments)
    names = list(dict.fromkeys(expand(arguments.names, (info.name for info in store.list()))))
    for name in names:
        store.info(name)
    for name in names:
        store.remove(name)
        if not arguments.json:
            print(f"removed: {name}")
    if arguments.json:
        print(terminal.to_json({"removed": names}))
    return 0


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole documents verify`."""
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="default: all documents; NAME/ means all below it"
    )
    parser.add_argument("--repair", action="store_true", help="encode damaged records again")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_encoding(parser, adapter="check what questions with this LoRA adapter need")


def _run_verify(arguments: argparse.Namespace) -> int:
    """Prints a line per problem."""
    documents = open_llm(arguments).documents_with(arguments.adapter)
    known = [info.name for info in documents.list()]
    names = expand(arguments.names, known) if arguments.names else None
    problems = documents.verify(names)
    repaired = _repair(documents, problems) if arguments.repair else []
    wrong = [problem for problem in problems if problem.name not in repaired]
    if arguments.json:
        found = [{**vars(problem), "repaired": problem.name in repaired} for problem in problems]
        print(terminal.to_json({"problems": found}))
        return 1 if wrong else 0
    for problem in problems:
        state = "repaired: " if problem.name in repaired else ""
        print(f"{state}{problem.name}: {problem.what}; expected {problem.right}")
    checked = terminal.count(len(set(known) if names is None else set(names)), "document")
    if wrong:
        left = [problem for problem in wrong if problem.kind != "source"]
        print(f"{checked} checked, {terminal.count(len(wrong), 'problem')}{_advice(bool(left))}")
    else:
        print(f"{checked} checked, no problems")
    return 1 if wrong else 0


def _repair(documents: Documents, problems: list[Problem]) -> list[str]:
    """The names of the documents that were repaired."""
    damaged = {problem.name for problem in problems if problem.kind == "source"}
    repaired = []
    for name in dict.fromkeys(problem.name for problem in problems):
        if name in damaged:
            continue
        try:
            documents.verify([name], repair=True)
        except KeyholeError as error:  # continue with the others
            terminal.error(f"{name}: {error}")
            continue
        repaired.append(name)
    return repaired


def _advice(repairable: bool) -> str:
    if repairable:
        return "; --repair encodes them again"
    return "; a document whose text is damaged must be added again with --overwrite, or removed"


class List:
    """Lists the stored documents. Without --model, no model is loaded.

    With --model, tokens and blocks are as this model counts them, and `encoded` says whether it can
    answer over a document at once; if not, `keyhole documents verify NAME --repair` encodes it.
    """

    add_arguments = staticmethod(_add_list_arguments)
    run = staticmethod(_run_list)


class Remove:
    """Removes documents, with the records of all models. No model is loaded.

    Nothing is removed if one of the names is unknown.
    """

    add_arguments = staticmethod(_add_remove_arguments)
    run = staticmethod(_run_remove)


class Verify:
    """Reads everything stored of the documents, compares it with its digests, and reports what is
    wrong.

    For damaged records and records of another model (revision, dtype, RoPE, tokenizer, LoRA
    adapter), the differences are named. --repair encodes them again from their texts; only a
    damaged text cannot be repaired. A record that was evicted is reported, and encoded again, only
    if its document is named. Exit status 1 if something is wrong and was not repaired.
    """

    add_arguments = staticmethod(_add_verify_arguments)
    run = staticmethod(_run_verify)

"""What the actions of `keyhole documents` share: the place, the engine, and what names mean."""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from keyhole.cli.common import flags, show
from keyhole.config import EngineConfig, parse_bytes
from keyhole.documents.source import default_place
from keyhole.errors import UnknownNameError
from keyhole.policies import make_policy

if TYPE_CHECKING:
    from keyhole.documents.store import DocumentInfo, DocumentStore
    from keyhole.llm import LLM

# Who looks at a store without a model: nobody encodes with this fingerprint.
_NO_MODEL = {"model": "none"}


class _OnUse(types.ModuleType):
    """A module in `sys.modules` that is imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def add_store(parser: argparse.ArgumentParser) -> None:
    """--store."""
    parser.add_argument(
        "--store",
        metavar="PLACE",
        help="folder or URL where documents are; default: in the user's cache folder",
    )


def add_limit(parser: argparse.ArgumentParser) -> None:
    """--limit."""
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help="most that the store may take, such as 20GiB; least recently used records leave, "
        "but for pinned ones; default: no limit",
    )


def open_llm(arguments: argparse.Namespace) -> LLM:
    """The model and engine that the arguments describe, with its documents.

    Settings are checked before the model is loaded.
    """
    policy = make_policy(arguments.policy) if "policy" in arguments else None
    settings = flags.settings_of(arguments, EngineConfig)
    EngineConfig(**settings)  # says what is wrong with them
    limit = getattr(arguments, "limit", None)
    limit_bytes = None if limit is None else parse_bytes(limit, "--limit")
    model = flags.load_model(arguments)
    from keyhole.llm import LLM

    return LLM(model, policy, documents=arguments.store, documents_limit=limit_bytes, **settings)


def open_store(arguments: argparse.Namespace) -> DocumentStore:
    """The documents without a model; they count as not encoded. Torch is not loaded for them."""
    sys.modules.setdefault("torch", _OnUse("torch"))
    from keyhole.documents.store import DocumentStore

    return DocumentStore(place(arguments), _NO_MODEL)


def place(arguments: argparse.Namespace) -> str:
    """Where the documents are."""
    return str(arguments.store or default_place())


def expand(given: Sequence[str], known: Iterable[str]) -> list[str]:
    """Names, in order; one that ends in "/" becomes all that begin with it, sorted.

    UnknownNameError if there are none; other names are taken as they are.
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
    return (
        f"{info.name}: {show.count(info.tokens, 'token')}, {show.count(blocks(info), 'block')} of "
        f"{info.block_size}, {show.bytes_text(info.size_bytes)}"
    )

"""Encodes files and stores them, each alone: one file as NAME, several as NAME/FILENAME each.

Files are UTF-8 text; all are read before the first is encoded. A text that is stored under its name
already is not encoded again, so that after an interruption the same command goes on. Ask over all
documents of several files with `--documents NAME/`.
"""

from __future__ import annotations

import argparse
import sys

from keyhole.cli.common import flags, show
from keyhole.cli.documents.files import read_documents
from keyhole.cli.documents.store import about, add_limit, add_store, open_llm, sentence
from keyhole.config import EngineConfig, is_count, require
from keyhole.documents.defaults import BLOCK_SIZE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole documents add`."""
    parser.add_argument("name", metavar="NAME", help="what questions call it")
    parser.add_argument("files", nargs="+", metavar="FILE", help='UTF-8 text; "-" is stdin')
    parser.add_argument("--pin", action="store_true", help="never let it make room for others")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what has this name and another text"
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=BLOCK_SIZE,
        metavar="N",
        help="tokens of a block, by which methods choose",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_store(parser)
    add_limit(parser)
    flags.add_model(parser)
    flags.add_settings(parser, EngineConfig, "engine", ("memory",))


def run(arguments: argparse.Namespace) -> int:
    """Prints a line per document as it is stored."""
    size = arguments.block_size
    require(is_count(size), "block_size", size, "at least 1")
    texts = read_documents(arguments.name, arguments.files)
    from keyhole.documents.source import check_name

    for name in texts:
        check_name(name)
    documents = open_llm(arguments).documents
    # Beside one JSON object on stdout, lines still show how far a long run has come.
    stream = sys.stderr if arguments.json else sys.stdout
    stored = []
    for number, (name, text) in enumerate(texts.items(), start=1):
        known = documents.store.stored(name, text, overwrite=arguments.overwrite)
        again = known is not None and known.block_size == size
        info = documents.add(
            name,
            text,
            overwrite=arguments.overwrite,
            pinned=arguments.pin,
            block_size=size,
        )
        stored.append(about(info))
        place = f"[{number} of {len(texts)}] " if len(texts) > 1 else ""
        print(f"{place}{'known' if again else 'stored'}: {sentence(info)}", file=stream, flush=True)
    if arguments.json:
        print(show.to_json({"documents": stored}))
    return 0

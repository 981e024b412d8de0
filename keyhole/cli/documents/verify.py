"""Reads all that is stored of documents, compares it with its digests, and tells what is wrong.

Damaged records and those of another model (revision, dtype, RoPE, tokenizer) are named with what
differs. --repair encodes them again from their texts; only a damaged text cannot be repaired.
Exit status 1 if something is wrong and was not repaired.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from keyhole.cli.common import flags, show
from keyhole.cli.documents.store import add_limit, add_store, expand, open_llm
from keyhole.config import EngineConfig
from keyhole.errors import KeyholeError

if TYPE_CHECKING:
    from keyhole.documents.store import Problem
    from keyhole.engine.documents.library import Documents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole documents verify`."""
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="all documents unless said; NAME/ is all below it"
    )
    parser.add_argument("--repair", action="store_true", help="encode again what is wrong")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_store(parser)
    add_limit(parser)
    flags.add_model(parser)
    flags.add_settings(parser, EngineConfig, "engine", ("memory",))


def run(arguments: argparse.Namespace) -> int:
    """Prints a line per problem."""
    documents = open_llm(arguments).documents
    known = [info.name for info in documents.list()]
    names = expand(arguments.names, known) if arguments.names else None
    problems = documents.verify(names)
    repaired = _repair(documents, problems) if arguments.repair else []
    wrong = [problem for problem in problems if problem.name not in repaired]
    if arguments.json:
        found = [{**vars(problem), "repaired": problem.name in repaired} for problem in problems]
        print(show.to_json({"problems": found}))
        return 1 if wrong else 0
    for problem in problems:
        state = "repaired: " if problem.name in repaired else ""
        print(f"{state}{problem.name}: {problem.what}; right would be {problem.right}")
    checked = show.count(len(set(known) if names is None else set(names)), "document")
    if wrong:
        left = [problem for problem in wrong if problem.kind != "source"]
        print(f"{checked} checked, {show.count(len(wrong), 'problem')}{_advice(bool(left))}")
    else:
        print(f"{checked} checked, all are right")
    return 1 if wrong else 0


def _repair(documents: Documents, problems: list[Problem]) -> list[str]:
    """Names of the documents that are right now."""
    damaged = {problem.name for problem in problems if problem.kind == "source"}
    repaired = []
    for name in dict.fromkeys(problem.name for problem in problems):
        if name in damaged:
            continue
        try:
            documents.verify([name], repair=True)
        except KeyholeError as error:  # the others are repaired all the same
            print(f"error: {name}: {error}", file=sys.stderr)
            continue
        repaired.append(name)
    return repaired


def _advice(repairable: bool) -> str:
    if repairable:
        return "; --repair encodes them again"
    return "; what has lost its text must be added again with --overwrite, or removed"

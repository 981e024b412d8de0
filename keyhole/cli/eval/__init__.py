"""Asks a model tasks under several policies and budgets, beside full attention.

Names may have settings: `--tasks passkey:depth=0.5`, `--policies delta:recent_pages=2,quest`. For
the bundled model, tasks in plain English stand for their forms in its own words. perplexity and
attention_recall force the text of --text through decode steps.

Every cell (task, length, setup, policy, budget) becomes a line of --output. What is there already,
with as many samples, is not measured again, so that after an interruption the same command goes on.
Exit status 1 if a policy was refused on this model. docs/evaluation.md says what is measured.
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

from keyhole.cli.common import flags
from keyhole.errors import UnknownNameError

#: Name and one line of help; each is a module here, eval_NAME, with `add_arguments` for the flags
#: that are its own and `run`.
SUITES = {
    "tasks": "tasks with right answers, and texts, under several policies and budgets",
    "attention": "what each layer loses of a text's attention under every policy",
    "paper": "RULER, derivations and stored documents, with controls and a verdict for each method",
}
_DEFAULT = "tasks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole eval`: those of all suites."""
    flags.add_model(parser)
    told = "; ".join(f"{name}: {about}" for name, about in SUITES.items())
    parser.add_argument(
        "--suite", metavar="NAME", default=_DEFAULT, help=f"what is measured: {told}"
    )
    parser.add_argument(
        "--output", metavar="FILE", default="keyhole-eval.jsonl", help="where the lines are kept"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for name in SUITES:
        _suite(name).add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the suite; returns its exit status."""
    if arguments.suite not in SUITES:
        raise UnknownNameError("suite", arguments.suite, SUITES)
    return int(_suite(arguments.suite).run(arguments))


def _suite(name: str) -> ModuleType:
    return importlib.import_module(f"keyhole.cli.eval.{name}")

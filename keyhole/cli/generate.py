"""Continues a prompt and streams the text; the counters follow on stderr.

The prompt is an argument, a file (--file), or what comes on stdin ("-", or nothing and a pipe).
Ctrl-C ends the answer and keeps what there is, with --json as finish_reason "abort". Several
completions (--n) run in one batch and follow each other; with --json the others are in `others`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.cli.common import flags, show
from keyhole.cli.common.interrupt import INTERRUPTED
from keyhole.config import EngineConfig, SamplingParams
from keyhole.errors import ConfigError

if TYPE_CHECKING:
    from keyhole.engine.sequence import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole generate`."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help='text, or "-" for stdin')
    parser.add_argument("--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--json", action="store_true", help="print one JSON object when done")
    flags.add_model(parser)
    flags.add_policy(parser)
    flags.add_settings(parser, SamplingParams, "sampling", without=("trace",))
    flags.add_settings(parser, EngineConfig, "engine")


def run(arguments: argparse.Namespace) -> int:
    """Streams the text, or prints one JSON object."""
    prompt, params = _prompt(arguments), flags.sampling_of(arguments)
    llm = flags.make_llm(arguments)
    from keyhole.cli.common import streaming
    from keyhole.engine.sequence import Result

    sequences: list[Sequence] = []
    for one in params.each():
        after = sequences[0] if sequences else None
        sequences.append(llm.submit(prompt, one, after=after))
    results = []
    for number, sequence in enumerate(sequences, 1):
        if len(sequences) > 1 and not arguments.json:
            print(f"completion {number} of {len(sequences)}:")
        results.append(streaming.answer(llm, sequence, silent=arguments.json))
        if not arguments.json:
            print(show.closing_line(results[-1].stats), file=sys.stderr)
        if results[-1].finish_reason == "abort":
            streaming.abort(llm, sequences)
    result = Result.of_all(results)
    if arguments.json:
        settings = {"model": llm.engine.model.name, "policy": show.describe(llm.policy)}
        print(show.to_json(vars(result) | settings))
    aborted = any(one.finish_reason == "abort" for one in results)
    return INTERRUPTED if aborted else 0


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.file is not None:
        if arguments.prompt is not None:
            raise ConfigError("give either a prompt or --file, not both")
        return _contents(arguments.file)
    if arguments.prompt == "-" or (arguments.prompt is None and not sys.stdin.isatty()):
        return sys.stdin.read()
    if arguments.prompt is None:
        raise ConfigError("no prompt; give one as an argument, with --file, or on stdin")
    return str(arguments.prompt)


def _contents(name: str) -> str:
    try:
        return Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file {name!r} cannot be read: {error}") from error

"""Answers a file of requests, one JSON object per line, in OpenAI's batch format.

Every line of the input has a custom_id, "method": "POST", a url, which is /v1/chat/completions or
/v1/completions, and a body as the server takes it. OUTPUT gets one line for each, in the order of
completion; a line that cannot be answered gets an error. To resume after any interruption, run the
same command again: it answers only what is missing. Exit status 1: some lines have errors.
"""

from __future__ import annotations

import argparse

from keyhole.cli.common import flags, terminal
from keyhole.config import EngineConfig
from keyhole.policies import make_policy
from keyhole.server.settings import BATCH_SETTINGS, ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole batch`."""
    parser.add_argument("input", metavar="INPUT", help="file of requests, one per line")
    parser.add_argument(
        "output", metavar="OUTPUT", help="file of answers; an existing one is continued"
    )
    text = "answer every n-th line, from line i on; each shard needs an OUTPUT of its own"
    parser.add_argument("--shard", metavar="I/N", default="1/1", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object when done")
    flags.add_model(parser)
    flags.add_adapters(parser)
    flags.add_policy(parser)
    flags.add_settings(parser, EngineConfig, "engine")
    flags.add_settings(parser, ServerConfig, "server", only=BATCH_SETTINGS)
    flags.add_documents(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answers what has no answer yet."""
    flags.require_server("batch")
    settings = flags.settings_of(arguments, ServerConfig)
    # These raise an error for invalid settings before the output is created.
    ServerConfig(**settings)
    EngineConfig(**flags.settings_of(arguments, EngineConfig))
    make_policy(arguments.policy)
    flags.find_model(arguments)
    from keyhole.batch.files import Shard
    from keyhole.batch.run import run_batch

    done = run_batch(
        arguments.input,
        arguments.output,
        lambda: flags.make_llm(arguments),
        shard=Shard.parse(arguments.shard),
        settings=settings,
    )
    if arguments.json:
        print(terminal.to_json(done))
    else:
        print(
            f"{terminal.count(done.lines, 'line')}: {done.answered} answered now, {done.kept} "
            f"before, {done.failed} with errors; {arguments.output}"
        )
    return 1 if done.failed else 0

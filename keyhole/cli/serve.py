"""Serves a model over HTTP, for any OpenAI client: chat, completions, stored documents.

Ctrl-C or SIGTERM lets running requests finish, and then ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys

from keyhole.cli.common import flags, show
from keyhole.config import EngineConfig
from keyhole.errors import ConfigError
from keyhole.server.settings import ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole serve`."""
    flags.add_model(parser)
    flags.add_settings(parser, ServerConfig, "server")
    flags.add_policy(parser)
    flags.add_settings(parser, EngineConfig, "engine")
    group = parser.add_argument_group("documents")
    group.add_argument("--documents", metavar="PLACE", help="folder or URL of stored documents")


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal."""
    config = ServerConfig(**flags.settings_of(arguments, ServerConfig))
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError("keyhole serve needs more packages: pip install 'keyhole[serve]'")
    llm = flags.make_llm(arguments, documents=arguments.documents)
    from keyhole.async_llm import AsyncLLM
    from keyhole.server.run import serve

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")

    def ready(address: str) -> None:
        print(f"{llm.engine.model.name} at {address}/v1", file=sys.stderr)
        print(f"policy: {show.sentence(llm.policy)}", file=sys.stderr)
        size = llm.engine.max_pages * llm.engine.config.page_size
        print(f"KV cache: room for {show.count(size, 'token')}", file=sys.stderr, flush=True)

    serve(AsyncLLM(llm), config, ready)
    return 0

"""Serves a model over HTTP, for any OpenAI client: chat, completions, stored documents.

On Ctrl-C or SIGTERM, running requests finish before the server exits.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.cli.common import flags, terminal
from keyhole.config import EngineConfig, bytes_text
from keyhole.errors import ConfigError, why
from keyhole.server.settings import ServerConfig

if TYPE_CHECKING:
    from keyhole.llm import LLM

_KEYS = "KEYHOLE_API_KEYS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole serve`."""
    parser.add_argument("place", nargs="?", metavar="MODEL", help="the same as --model")
    flags.add_model(parser)
    flags.add_adapters(parser)
    flags.add_device_map(parser)
    text = "folder or hub id of a tokenizer; default: the model's own"
    parser.add_argument("--tokenizer", metavar="PLACE", help=text)
    flags.add_settings(parser, ServerConfig, "server")
    text = f"file with one key per line, in addition to --api-key and {_KEYS} (comma-separated)"
    parser.add_argument("--api-key-file", metavar="FILE", help=text)
    flags.add_policy(parser)
    flags.add_settings(parser, EngineConfig, "engine")
    flags.add_documents(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal."""
    arguments.model = _model(arguments)
    settings = flags.settings_of(arguments, ServerConfig)
    keys = (*settings.get("api_key", ()), *_keys(arguments.api_key_file))
    config = ServerConfig(**{**settings, "api_key": keys})
    flags.require_server("serve")
    llm = flags.make_llm(arguments)
    from keyhole.server import logs
    from keyhole.server.run import serve

    def ready(address: str) -> None:
        print(f"{llm.engine.model.name} at {address}/v1", file=sys.stderr)
        print(f"policy: {terminal.every_setting(llm.policy)}", file=sys.stderr)
        print(_memory(llm), file=sys.stderr, flush=True)

    with logs.configured(config.log_format):
        serve(llm, config, ready)
    return 0


def _model(arguments: argparse.Namespace) -> str | None:
    """The one that is named, by position or by --model."""
    place, flag = arguments.place, arguments.model
    if place is not None and flag is not None and place != flag:
        raise ConfigError(f"MODEL {place!r} and --model {flag!r} differ; give one of them")
    return flag if place is None else str(place)


def _keys(path: str | None) -> tuple[str, ...]:
    """API keys of the environment and of a file, where a process list does not show them."""
    found = os.environ.get(_KEYS, "").split(",")
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file {path!r} cannot be read: {why(error)}") from error
        if not any(line.strip() for line in lines):
            raise ConfigError(f"--api-key-file {path!r} must have at least one key")
        found += lines
    return tuple(key.strip() for key in found if key.strip())


def _memory(llm: LLM) -> str:
    """Memory of the weights, capacity of the KV cache, and the length from which layers are
    offloaded.
    """
    from keyhole.engine.allocation import model_size

    engine = llm.engine
    weights = bytes_text(model_size(engine.model, None).weight_bytes)
    room = terminal.count(engine.max_pages * engine.config.page_size, "token")
    line = f"memory: weights {weights}; KV cache: room for {room}"
    if engine.offloader is None:
        return line
    plan = engine.offloader.plan
    cache, first = (
        bytes_text(plan.cache_memory),
        terminal.count(plan.thresholds[0], "token"),
    )
    return f"{line} in {cache} and beyond, the first layer is offloaded after {first}"

"""A conversation: every line is a message, and the keys and values stay between the turns.

/reset forgets the conversation, /quit (or the end of the input) ends it. Ctrl-C ends an answer, of
which what was said is kept; at the prompt it ends the conversation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from keyhole.cli.common import flags, show
from keyhole.config import EngineConfig, SamplingParams
from keyhole.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from keyhole.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole chat`."""
    flags.add_model(parser)
    flags.add_policy(parser)
    flags.add_settings(parser, SamplingParams, "sampling", without=("n", "trace"))
    flags.add_settings(parser, EngineConfig, "engine")


def run(arguments: argparse.Namespace) -> int:
    """Reads messages until the end of the input."""
    params = flags.sampling_of(arguments)
    llm = flags.make_llm(arguments)
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        raise ConfigError(f"model {llm.engine.model.name!r} has no chat template; use generate")
    about = f"{llm.engine.model.name}, {show.sentence(llm.policy)}; /reset forgets, /quit ends"
    print(about, file=sys.stderr)
    messages: list[dict[str, str]] = []
    for line in _lines():
        if line == "/quit":
            break
        if line == "/reset":
            messages.clear()
            print("forgotten", file=sys.stderr)
        elif line.startswith("/"):
            show.error(f"unknown command {line!r}; there are /reset and /quit")
        elif line:
            _turn(llm, messages, line, params)
    return 0


def _turn(llm: LLM, messages: list[dict[str, str]], line: str, params: SamplingParams) -> None:
    """One message and its answer; a message that cannot be served leaves no trace."""
    from keyhole.cli.common import streaming

    messages.append({"role": "user", "content": line})
    try:
        result = streaming.answer(llm, llm.submit_chat(messages, params, reuse_generated=True))
    except RequestError as error:
        del messages[-1]
        show.error(f"{error}; /reset starts anew")
        return
    stats = result.stats
    if result.finish_reason == "abort" and not result.text:
        del messages[-1]
        print("stopped before the answer began; the message is forgotten", file=sys.stderr)
        return
    messages.append({"role": "assistant", "content": result.text})
    kept = f"{stats.cached_prompt_tokens} of {stats.prompt_tokens} prompt tokens kept"
    print(f"{show.closing_line(stats)} | {kept}", file=sys.stderr)


def _lines() -> Iterator[str]:
    """Stripped lines of stdin, with a prompt where someone types."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  (gives `input` its history)

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return

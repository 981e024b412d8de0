"""Continues a prompt and streams the text; the counters follow on stderr.

The prompt is an argument, a file (--file), token ids (--prompt-ids), or read from stdin ("-", or no
argument and a pipe). A model without a tokenizer takes and returns token ids only.
Ctrl-C ends the answer and keeps the text so far, in --json with finish_reason "abort". Several
completions (--n) run in one batch and are printed one after another; with --json all but the
first are in `others`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.cli.common import flags, terminal
from keyhole.cli.common.terminal import INTERRUPTED
from keyhole.config import EngineConfig, SamplingParams
from keyhole.errors import ConfigError, RequestError, why

if TYPE_CHECKING:
    from keyhole.engine.sequence import Sequence
    from keyhole.llm import LLM
    from keyhole.tokenization import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole generate`."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help='text, or "-" for stdin')
    parser.add_argument("--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument(
        "--prompt-ids", metavar="IDS", help="the prompt as token ids, such as 1,15,8"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object when done")
    flags.add_model(parser)
    flags.add_adapters(parser)
    flags.add_policy(parser)
    flags.add_settings(parser, SamplingParams, "sampling", without=("trace",))
    flags.add_settings(parser, EngineConfig, "engine")


def run(arguments: argparse.Namespace) -> int:
    """Streams the text, or prints one JSON object."""
    prompt, params = _prompt(arguments), flags.sampling_of(arguments)
    flags.require_json_for_logprobs(arguments)
    llm = flags.make_llm(arguments)
    from keyhole.engine.sequence import Result

    sequences: list[Sequence] = []
    for one in params.each():
        after = sequences[0] if sequences else None
        sequences.append(llm.submit(prompt, one, after=after))
    results = []
    for number, sequence in enumerate(sequences, 1):
        if len(sequences) > 1 and not arguments.json:
            print(f"completion {number} of {len(sequences)}:")
        results.append(terminal.answer(llm, sequence, silent=arguments.json))
        if not arguments.json:
            print(terminal.closing_line(results[-1].stats), file=sys.stderr)
        if results[-1].finish_reason == "abort":
            terminal.abort(llm, sequences)
    result = Result.of_all(results)
    if arguments.json:
        settings = {"model": llm.engine.model.name, "policy": terminal.describe(llm.policy)}
        print(terminal.to_json(vars(result) | settings))
    aborted = any(one.finish_reason == "abort" for one in results)
    return INTERRUPTED if aborted else 0


def _prompt(arguments: argparse.Namespace) -> Prompt:
    given = {
        "a prompt": arguments.prompt,
        "--file": arguments.file,
        "--prompt-ids": arguments.prompt_ids,
    }
    found = [name for name, value in given.items() if value is not None]
    if len(found) > 1:
        raise ConfigError(f"give either {found[0]} or {found[1]}, not both")
    if arguments.prompt_ids is not None:
        return _ids(arguments.prompt_ids)
    if arguments.file is not None:
        return _contents(arguments.file)
    if arguments.prompt == "-" or (arguments.prompt is None and not sys.stdin.isatty()):
        return "".join(terminal.stdin_lines())
    if arguments.prompt is None:
        raise ConfigError(
            "no prompt; give one as an argument, with --file or --prompt-ids, or on stdin"
        )
    return str(arguments.prompt)


def _ids(text: str) -> list[int]:
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise ConfigError(f"--prompt-ids: {part!r} must be a whole number, as in 1,15,8")
    return [int(part) for part in text.split(",")]


def _contents(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file {name!r} cannot be read: {why(error)}") from error


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole chat`."""
    flags.add_model(parser)
    flags.add_adapters(parser)
    flags.add_policy(parser)
    flags.add_settings(parser, SamplingParams, "sampling", without=("n", "trace", "logprobs"))
    flags.add_settings(parser, EngineConfig, "engine")


def _run_chat(arguments: argparse.Namespace) -> int:
    """Reads messages until the end of the input."""
    params = flags.sampling_of(arguments)
    llm = flags.make_llm(arguments)
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        raise ConfigError(f"model {llm.engine.model.name!r} has no chat template; use generate")
    about = (
        f"{llm.engine.model.name}, {terminal.sentence(llm.policy)}; "
        "/reset starts a new conversation, /quit exits"
    )
    print(about, file=sys.stderr)
    messages: list[dict[str, str]] = []
    for line in _lines():
        if line == "/quit":
            break
        if line == "/reset":
            messages.clear()
            print("new conversation", file=sys.stderr)
        elif line.startswith("/"):
            terminal.error(f"unknown command {line!r}; the commands are /reset and /quit")
        elif line:
            _turn(llm, messages, line, params)
    return 0


def _turn(llm: LLM, messages: list[dict[str, str]], line: str, params: SamplingParams) -> None:
    """One message and its answer; a message that fails is removed from the conversation."""
    messages.append({"role": "user", "content": line})
    try:
        result = terminal.answer(llm, llm.submit_chat(messages, params, reuse_generated=True))
    except RequestError as error:
        del messages[-1]
        terminal.error(f"{error}; /reset starts a new conversation")
        return
    stats = result.stats
    if result.finish_reason == "abort" and not result.text:
        del messages[-1]
        print("stopped before the answer began; the message was removed", file=sys.stderr)
        return
    messages.append({"role": "assistant", "content": result.text})
    kept = f"{stats.cached_prompt_tokens} of {stats.prompt_tokens} prompt tokens cached"
    print(f"{terminal.closing_line(stats)} | {kept}", file=sys.stderr)


def _lines() -> Iterator[str]:
    """Stripped lines of stdin, with a prompt where someone types."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in terminal.stdin_lines())
        return
    import readline  # noqa: F401  (gives `input` its history)

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return


class Chat:
    """A conversation: every line is a message, and keys and values are kept between turns.

    /reset starts a new conversation, /quit (or the end of the input) exits. Ctrl-C ends an answer
    and keeps its text so far; at the prompt it exits.
    """

    add_arguments = staticmethod(_add_chat_arguments)
    run = staticmethod(_run_chat)

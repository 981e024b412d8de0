"""Answers a question over stored documents and streams the text; the counters follow on stderr.

Documents stand in the order given between --prefix and the question, which is an argument or comes
on stdin ("-", or nothing and a pipe). --reuse says what is kept of what is stored and what is
computed again, --policy what each step of the answer reads of that. With --json, `kept` and
`written` list, per layer, the runs [start, stop) of tokens, all documents in a row.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from keyhole.cli.common import flags, show
from keyhole.cli.common.interrupt import INTERRUPTED
from keyhole.cli.documents.store import add_store, expand, open_llm
from keyhole.config import EngineConfig, SamplingParams
from keyhole.errors import ConfigError
from keyhole.reuse import make_reuse

if TYPE_CHECKING:
    from torch import Tensor

    from keyhole.engine.documents.filling import Reused
    from keyhole.engine.sequence import Stats

# Documents whose P is written out; of more, those that want something.
_MOST_SHARES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole documents ask`."""
    parser.add_argument("question", nargs="?", metavar="QUESTION", help='text, or "-" for stdin')
    parser.add_argument("--json", action="store_true", help="print one JSON object when done")
    add_prompt(parser)
    add_store(parser)
    flags.add_model(parser)
    flags.add_policy(parser)
    flags.add_reuse(parser)
    flags.add_settings(parser, SamplingParams, "sampling", without=("n", "trace"))
    flags.add_settings(parser, EngineConfig, "engine")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """--documents, and what stands around them."""
    parser.add_argument(
        "--documents",
        nargs="+",
        default=[],
        metavar="NAME",
        help="stored documents, in their order; NAME/ is all below it",
    )
    parser.add_argument("--prefix", default="", metavar="TEXT", help="what stands before them")
    parser.add_argument("--separator", default="", metavar="TEXT", help="what stands between two")
    parser.add_argument(
        "--chat", action="store_true", help="make them a message of the model's chat template"
    )


def run(arguments: argparse.Namespace) -> int:
    """Streams the answer, or prints one JSON object."""
    question, params = _question(arguments), flags.sampling_of(arguments)
    if not arguments.documents:
        raise ConfigError(
            "no documents; name stored ones: --documents NAME NAME, see `keyhole documents list`"
        )
    flags.find_model(arguments)  # reuse methods import torch
    reuse = make_reuse(arguments.reuse)
    llm = open_llm(arguments)
    names = expand(arguments.documents, (info.name for info in llm.documents.list()))
    reuse = reuse.resolve(llm.engine.geometry)
    from keyhole.cli.common import streaming

    with ExitStack() as stack:
        sequence = llm.submit_ask(
            stack,
            question,
            names,
            reuse=reuse,
            params=params,
            prefix=arguments.prefix,
            separator=arguments.separator,
            chat=arguments.chat,
        )
        result = streaming.answer(llm, sequence, silent=arguments.json)
    if arguments.json:
        about = {
            "model": llm.engine.model.name,
            "policy": show.describe(llm.policy),
            "reuse": show.describe(reuse),
        }
        print(show.to_json({**vars(result), "reused": reused_object(result.reused), **about}))
    else:
        print(show.closing_line(result.stats), file=sys.stderr)
        for line in closing_lines(len(names), result.reused, result.stats):
            print(line, file=sys.stderr)
    return INTERRUPTED if result.finish_reason == "abort" else 0


def closing_lines(number: int, reused: Reused | None, stats: Stats) -> list[str]:
    """What the prompt took from the store, for people; number: of documents."""
    what = show.count(number, "document")
    if reused is None:
        return [f"{what} computed like any prompt, {stats.cached_prompt_tokens} tokens known"]
    parts = [
        what,
        f"{100 * reused.sequence_ratio:.1f} % kept",
        f"{100 * reused.recompute_ratio:.1f} % computed again",
        f"{show.count(reused.tokens_not_computed, 'token')} not computed",
        f"{show.bytes_text(reused.bytes_read)} read from the store",
    ]
    lines = [" | ".join(parts)]
    if reused.shares is not None:
        lines.append(f"share of middle blocks kept: {_shares(reused.documents, reused.shares)}")
    return lines


def _shares(names: Any, shares: tuple[float, ...]) -> str:
    pairs = list(zip(names, shares, strict=True))
    wanting = [pair for pair in pairs if pair[1] > 0]
    shown = pairs if len(pairs) <= _MOST_SHARES else wanting[:_MOST_SHARES]
    text = ", ".join(f"{name} {share:.2f}" for name, share in shown)
    if len(shown) == len(pairs):
        return text
    left = len(wanting) - len(shown)
    rest = [f"{left} others above 0"] if left else []
    rest += [f"{len(pairs) - len(wanting)} with 0"] if len(wanting) < len(pairs) else []
    return ", ".join([*([text] if text else []), *rest])


def reused_object(reused: Reused | None) -> dict[str, Any] | None:
    """What was reused for JSON, its maps of tokens as runs."""
    if reused is None:
        return None
    return {**vars(reused), "kept": _runs(reused.kept), "written": _runs(reused.written)}


def _runs(tokens: Tensor) -> list[list[list[int]]]:
    """Per layer of bool [L, T] the runs of True, [start, stop]."""
    import torch

    edges = torch.nn.functional.pad(tokens.to(torch.int8), (1, 1)).diff(dim=1)
    return [row.nonzero().view(-1, 2).tolist() for row in edges]


def _question(arguments: argparse.Namespace) -> str:
    given = arguments.question
    if given == "-" or (given is None and not sys.stdin.isatty()):
        given = sys.stdin.read()
    if given is None:
        raise ConfigError("no question; give it before --documents, or on stdin")
    if not given.strip():
        raise ConfigError("the question is empty; give it before --documents, or on stdin")
    return str(given)

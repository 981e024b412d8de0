"""Asks questions over stored documents, and draws what a question keeps of them."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Any

from keyhole import drawing
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.terminal import INTERRUPTED, PICTURE, Output, check_outputs
from keyhole.cli.documents.manage import about, add_store, blocks, expand, open_llm
from keyhole.config import EngineConfig, SamplingParams, bytes_text
from keyhole.errors import ConfigError
from keyhole.reuse import make_reuse

if TYPE_CHECKING:
    from torch import Tensor

    from keyhole.documents.store import DocumentInfo
    from keyhole.engine.documents.filling import Reused
    from keyhole.engine.sequence import Stats
    from keyhole.llm import LLM
    from keyhole.reuse.base import Reuse


# Up to this many documents, every P is listed; for more, only those above 0.
_MOST_SHARES = 16


def _add_ask_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole documents ask`."""
    parser.add_argument("question", nargs="?", metavar="QUESTION", help='text, or "-" for stdin')
    parser.add_argument("--json", action="store_true", help="print one JSON object when done")
    add_prompt(parser)
    add_store(parser)
    flags.add_check(parser, "--check")
    flags.add_model(parser)
    flags.add_adapters(parser)
    flags.add_policy(parser)
    flags.add_reuse(parser)
    flags.add_settings(parser, SamplingParams, "sampling", without=("n", "trace"))
    flags.add_settings(parser, EngineConfig, "engine")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """--documents, and the text around them."""
    parser.add_argument(
        "--documents",
        nargs="+",
        default=[],
        metavar="NAME",
        help="stored documents, in this order; NAME/ selects all documents below it",
    )
    parser.add_argument("--prefix", default="", metavar="TEXT", help="text before the documents")
    parser.add_argument(
        "--separator", default="", metavar="TEXT", help="text between two documents"
    )
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")


def _run_ask(arguments: argparse.Namespace) -> int:
    """Streams the answer, or prints one JSON object."""
    question, params = _question(arguments), flags.sampling_of(arguments)
    flags.require_json_for_logprobs(arguments)
    if not arguments.documents:
        raise ConfigError(
            "no documents; give names from `keyhole documents list`, as in --documents NAME NAME"
        )
    flags.find_model(arguments)  # reuse methods import torch
    reuse = make_reuse(arguments.reuse)
    llm = open_llm(arguments)
    names = expand(arguments.documents, (info.name for info in llm.documents.list()))
    reuse = reuse.resolve(llm.engine.geometry)

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
        result = terminal.answer(llm, sequence, silent=arguments.json)
    if arguments.json:
        about = {
            "model": llm.engine.model.name,
            "policy": terminal.describe(llm.policy),
            "reuse": terminal.describe(reuse),
        }
        print(terminal.to_json({**vars(result), "reused": reused_object(result.reused), **about}))
    else:
        print(terminal.closing_line(result.stats), file=sys.stderr)
        for line in closing_lines(len(names), result.reused, result.stats):
            print(line, file=sys.stderr)
    return INTERRUPTED if result.finish_reason == "abort" else 0


def closing_lines(number: int, reused: Reused | None, stats: Stats) -> list[str]:
    """What the prompt used of the store, for people; number: of documents."""
    what = terminal.count(number, "document")
    if reused is None:
        return [f"{what} computed like any prompt, {stats.cached_prompt_tokens} tokens cached"]
    parts = [
        what,
        f"{100 * reused.sequence_ratio:.1f} % kept",
        f"{100 * reused.recompute_ratio:.1f} % recomputed",
        f"{terminal.count(reused.tokens_not_computed, 'token')} not computed",
        f"{bytes_text(reused.bytes_read)} read from the store",
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
    """What was reused, as JSON: maps of tokens as runs."""
    if reused is None:
        return None
    return {**vars(reused), "kept": _runs(reused.kept), "recomputed": _runs(reused.recomputed)}


def _runs(tokens: Tensor) -> list[list[list[int]]]:
    """Per layer of bool [L, T] the runs of True, [start, stop]."""
    import torch

    edges = torch.nn.functional.pad(tokens.to(torch.int8), (1, 1)).diff(dim=1)
    return [row.nonzero().view(-1, 2).tolist() for row in edges]


def _question(arguments: argparse.Namespace) -> str:
    given = arguments.question
    if given == "-" or (given is None and not sys.stdin.isatty()):
        given = "".join(terminal.stdin_lines())
    if given is None:
        raise ConfigError("no question; give it before --documents, or on stdin")
    if not given.strip():
        raise ConfigError("the question is empty; give it before --documents, or on stdin")
    return str(given)


_PICTURE = "keyhole-document.png"
# Letters of a question in a title.
_MOST_TITLE = 90


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole documents show`."""
    parser.add_argument("name", metavar="NAME", help="a stored document")
    parser.add_argument("--question", metavar="TEXT", help="draw what this question keeps")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"the picture, a PNG; default: {_PICTURE} with --question, else none",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_prompt(parser)
    add_store(parser)
    flags.add_model(parser)
    flags.add_reuse(parser)


def _run_show(arguments: argparse.Namespace) -> int:
    """Prints, and draws."""
    reuse = make_reuse(arguments.reuse)
    if arguments.question is None and arguments.documents:
        raise ConfigError("--documents needs --question")
    if arguments.question is not None and arguments.output is None:
        arguments.output = _PICTURE
    if arguments.output is not None:
        check_outputs(Output("--output", arguments.output, PICTURE))
        drawing.matplotlib()
    llm = open_llm(arguments)
    info = llm.documents.get(arguments.name)
    if arguments.question is not None:
        return _show_question(arguments, llm, reuse)
    if arguments.output:
        _draw_document(llm, info, arguments.output)
    if arguments.json:
        print(terminal.to_json({**about(info), "output": arguments.output}))
        return 0
    for what, value in _rows(info):
        print(f"{what:8} {value}")
    if arguments.output:
        print(f"written: {arguments.output}")
    return 0


def _rows(info: DocumentInfo) -> list[tuple[str, str]]:
    models = len(info.records)
    used = terminal.count(info.hits, "time")
    if info.hits:
        used += f", last {_time(info.last_used)}"
    return [
        ("name", info.name),
        ("sha256", info.digest),
        ("tokens", f"{info.tokens:,}"),
        ("blocks", f"{blocks(info):,} of {info.block_size} tokens"),
        (
            "size",
            f"{bytes_text(info.size_bytes)}, encoded by {terminal.count(models, 'model')}",
        ),
        ("added", _time(info.created)),
        ("used", used),
        ("pinned", "yes" if info.pinned else "no"),
        ("encoded", "by this model" if info.encoded else "not by this model"),
    ]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _draw_document(llm: LLM, info: DocumentInfo, path: str) -> None:
    from keyhole.eval.report.document_charts import document_chart

    with llm.documents.open(info.name) as document:
        layers = [document.statistics(layer) for layer in range(document.num_layers)]
        size = f"{info.tokens:,} tokens in blocks of {info.block_size}"
        subtitle = f"{size}; ranks within a layer, dark matters most"
        document_chart(layers, path, title=info.name, subtitle=subtitle)


def _subtitle(reuse: Reuse, reused: Reused) -> str:
    """The method with the settings that differ from their defaults, and what it kept."""
    fields = dataclasses.fields(reuse)
    values = {field.name: getattr(reuse, field.name) for field in fields}
    changed = [
        f"{field.name} {terminal.setting(values[field.name])}"
        for field in fields
        if values[field.name] != field.default
    ]
    settings = f" ({', '.join(changed)})" if changed else ""
    return (
        f"{reuse.name}{settings}: "
        f"{100 * reused.sequence_ratio:.1f} % kept, "
        f"{100 * reused.recompute_ratio:.1f} % recomputed"
    )


def _show_question(arguments: argparse.Namespace, llm: LLM, reuse: Reuse) -> int:
    from keyhole.eval.report.document_charts import kept_chart

    infos = {info.name: info for info in llm.documents.list()}
    names = expand(arguments.documents, infos)
    names = names if arguments.name in names else [arguments.name, *names]
    if reuse.exact:
        raise ConfigError(
            f"reuse method {reuse.name!r} recomputes everything, so there is nothing to draw"
        )
    result = llm.ask(
        arguments.question,
        names,
        reuse=reuse,
        params=SamplingParams(max_tokens=1),
        prefix=arguments.prefix,
        separator=arguments.separator,
        chat=arguments.chat,
    )
    reused = result.reused
    assert reused is not None
    path = arguments.output
    shown = [infos[name] for name in reused.documents]
    title = " ".join(arguments.question.split())
    kept_chart(
        reused,
        [info.tokens for info in shown],
        shown[0].block_size,
        path,
        title=title if len(title) <= _MOST_TITLE else f"{title[: _MOST_TITLE - 1]}…",
        subtitle=_subtitle(reuse, reused),
    )
    if arguments.json:
        print(terminal.to_json({"reused": reused_object(reused), "output": path}))
        return 0
    for line in closing_lines(len(names), reused, result.stats):
        print(line)
    print(f"written: {path}")
    return 0


class Ask:
    """Answers a question over stored documents and streams the text; the counters follow on stderr.

    The prompt is --prefix, then the documents in the given order, then the question, which is an
    argument or read from stdin ("-", or no argument and a pipe). --reuse sets what is kept and
    recomputed of the stored documents, --policy what each step of the answer reads of that. With
    --json, `kept` and `recomputed` list, per layer, the runs [start, stop) of tokens that were kept
    and recomputed, over all documents in order.
    """

    add_arguments = staticmethod(_add_ask_arguments)
    run = staticmethod(_run_ask)


class Show:
    """Describes a stored document, and draws what a question keeps of it.

    Without --question: its size, use and blocks; --output adds a picture of how much each block
    matters in each layer. With --question: the blocks that each layer keeps, drops and recomputes
    for this question over --documents; NAME comes first unless it is among them.
    """

    add_arguments = staticmethod(_add_show_arguments)
    run = staticmethod(_run_show)

"""Says what is stored of a document, and draws what a question keeps of it.

Without --question: its size, use and blocks; --output adds a picture of how much each block matters
in each layer. With --question: the blocks that each layer keeps, drops and computes again for that
question over --documents; NAME stands first unless it is among them.
"""

from __future__ import annotations

import argparse
import dataclasses
from datetime import datetime
from typing import TYPE_CHECKING

from keyhole import drawing
from keyhole.cli.common import flags, outputs, show
from keyhole.cli.common.outputs import Output
from keyhole.cli.documents.ask import add_prompt, closing_lines, reused_object
from keyhole.cli.documents.store import about, add_store, blocks, expand, open_llm
from keyhole.config import SamplingParams
from keyhole.errors import ConfigError
from keyhole.reuse import make_reuse

if TYPE_CHECKING:
    from keyhole.documents.store import DocumentInfo
    from keyhole.engine.documents.filling import Reused
    from keyhole.llm import LLM
    from keyhole.reuse.base import Reuse

_PICTURE = "keyhole-document.png"
# Letters of a question in a title.
_MOST_TITLE = 90


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace) -> int:
    """Prints, and draws."""
    reuse = make_reuse(arguments.reuse)
    if arguments.question is None and arguments.documents:
        raise ConfigError("--documents needs a --question that is asked over them")
    if arguments.question is not None and arguments.output is None:
        arguments.output = _PICTURE
    if arguments.output is not None:
        outputs.check(Output("--output", arguments.output, outputs.PICTURE))
        drawing.matplotlib()
    llm = open_llm(arguments)
    info = llm.documents.get(arguments.name)
    if arguments.question is not None:
        return _question(arguments, llm, reuse)
    if arguments.output:
        _draw_document(llm, info, arguments.output)
    if arguments.json:
        print(show.to_json({**about(info), "output": arguments.output}))
        return 0
    for what, value in _rows(info):
        print(f"{what:8} {value}")
    if arguments.output:
        print(f"written: {arguments.output}")
    return 0


def _rows(info: DocumentInfo) -> list[tuple[str, str]]:
    models = len(info.records)
    used = show.count(info.hits, "time")
    if info.hits:
        used += f", last {_time(info.last_used)}"
    return [
        ("name", info.name),
        ("sha256", info.digest),
        ("tokens", f"{info.tokens:,}"),
        ("blocks", f"{blocks(info):,} of {info.block_size} tokens"),
        ("size", f"{show.bytes_text(info.size_bytes)}, encoded by {show.count(models, 'model')}"),
        ("added", _time(info.created)),
        ("used", used),
        ("pinned", "yes" if info.pinned else "no"),
        ("encoded", "by this model" if info.encoded else "not by this model"),
    ]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _draw_document(llm: LLM, info: DocumentInfo, path: str) -> None:
    from keyhole.eval.charts.document import document_chart

    with llm.documents.open(info.name) as document:
        layers = [document.statistics(layer) for layer in range(document.num_layers)]
        size = f"{info.tokens:,} tokens in blocks of {info.block_size}"
        subtitle = f"{size}; ranks within a layer, dark matters most"
        document_chart(layers, path, title=info.name, subtitle=subtitle)


def _subtitle(reuse: Reuse, reused: Reused) -> str:
    """The method with what was set of it, and what it kept."""
    fields = dataclasses.fields(reuse)
    values = {field.name: getattr(reuse, field.name) for field in fields}
    changed = [
        f"{field.name} {show.setting(values[field.name])}"
        for field in fields
        if values[field.name] != field.default
    ]
    settings = f" ({', '.join(changed)})" if changed else ""
    return (
        f"{reuse.name}{settings}: "
        f"{100 * reused.sequence_ratio:.1f} % kept, "
        f"{100 * reused.recompute_ratio:.1f} % computed again"
    )


def _question(arguments: argparse.Namespace, llm: LLM, reuse: Reuse) -> int:
    from keyhole.eval.charts.kept_tokens import kept_chart

    infos = {info.name: info for info in llm.documents.list()}
    names = expand(arguments.documents, infos)
    names = names if arguments.name in names else [arguments.name, *names]
    if reuse.exact:
        raise ConfigError(
            f"reuse method {reuse.name!r} computes everything, so there is nothing to draw"
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
        print(show.to_json({"reused": reused_object(reused), "output": path}))
        return 0
    for line in closing_lines(len(names), reused, result.stats):
        print(line)
    print(f"written: {path}")
    return 0

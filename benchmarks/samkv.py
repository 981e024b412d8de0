"""Questions over stored documents: right answers, what is kept, computed and read, and time.

    python -m benchmarks.samkv [--items 200] [--kinds one ...] [--shapes 8x512 ...] [--ablation]
    python -m benchmarks.samkv --render

The bundled model answers the same questions under every method, in turns, each alone. Documents are
encoded once and read from a store on disk; nothing is known of earlier prompts. A cell is a kind of
question and a shape, documents x words; each adds a line to benchmarks/results/samkv.jsonl when it
is done, so that a run that was stopped goes on with the next cell under the same command
(`--again` measures cells that are there already). Where a cell lacks some methods only these are
measured, on the same questions and beside `recompute`; their line is added to the cell. `--render`
writes docs/samkv.md and its pictures. Seeds count from 0.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import keyhole
from keyhole import LLM, SamplingParams
from keyhole.bench import measure
from keyhole.evaluate import document_page
from keyhole.evaluate.document_methods import ABLATION, METHODS, Variant
from keyhole.evaluate.document_tasks import DocumentItem, exact_match, make, token_f1
from keyhole.reuse import make_reuse

#: Kind of question, and where in their documents the sentences stand that it needs.
KINDS = (
    "one/ends",
    "one/middle",
    "two_hop/ends",
    "two_hop/middle",
    "needs_each_other/ends",
    "needs_each_other/middle",
)
SHAPES = ("4x512", "8x512", "16x512", "4x1536")
OUTPUT = measure.results() / "samkv.jsonl"
# With blocks of 64 three of them are already two fifths of 512 words.
_BLOCK_SIZE = {512: 32}
# The longest answer has thirteen words.
_ANSWER = SamplingParams(max_tokens=16, temperature=0.0)


def main() -> None:
    """Asks, counts and stores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    parser.add_argument("--ablation", action="store_true", help="SamKV's switches, too")
    parser.add_argument("--again", action="store_true", help="cells that are there already, too")
    parser.add_argument("--note", default="")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--render", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    if not arguments.render:
        # Times are compared with those of recompute.
        names = ("recompute", *arguments.methods)
        variants = {name: variant for name, variant in METHODS.items() if name in names}
        if arguments.ablation:
            variants |= ABLATION
        with tempfile.TemporaryDirectory() as folder:
            llm = LLM(keyhole.tiny(), device="cpu", prefix_cache=False, documents=folder)
            for shape in arguments.shapes:
                for kind in arguments.kinds:
                    _cell(llm, kind, shape, variants, arguments)
    document_page.write(document_page.stored(OUTPUT), measure.ROOT / "docs")


def _cell(
    llm: LLM, kind: str, shape: str, variants: dict[str, Variant], arguments: argparse.Namespace
) -> None:
    """One line, unless it is there."""
    block_size, items = _BLOCK_SIZE.get(int(shape.split("x")[1]), 64), arguments.items
    known = document_page.stored(arguments.output).get((kind, shape))
    if known is not None and not arguments.again and known["items"] >= items:
        there = {result["method"] for result in known["results"]}
        missing = {name: variant for name, variant in variants.items() if name not in there}
        if not missing:
            print(f"{kind} {shape}: there already", file=sys.stderr)
            return
        if known["block_size"] == block_size:
            # The same questions, and what times are compared with.
            variants, items = {"recompute": variants["recompute"]} | missing, known["items"]
    line = measure.header("samkv", torch.device("cpu"), arguments.note, keyhole.__version__)
    line["command"] = shlex.join(["python", "-m", "benchmarks.samkv", *sys.argv[1:]])
    line |= {"kind": kind, "shape": shape, "items": items, "block_size": block_size}
    line["results"] = count(llm, kind, shape, variants, items, block_size)
    measure.append(arguments.output, line)
    print(document_page.cell(line), flush=True)


def count(
    llm: LLM, kind: str, shape: str, variants: dict[str, Variant], items: int, block_size: int
) -> list[dict[str, Any]]:
    """A result per method over the first `items` items of a cell."""
    question, where = kind.split("/")
    number, words = map(int, shape.split("x"))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for seed in tqdm(range(items), desc=f"{kind} {shape}", disable=None):
        item = make(question, where=where, num_documents=number, words=words, seed=seed)
        for name, text in zip(item.names, item.documents, strict=True):
            llm.documents.add(name, text, block_size=block_size)
        # Who is first has the coldest caches: everybody in turn.
        order = list(variants)
        for name in order[seed % len(order) :] + order[: seed % len(order)]:
            found[name].append(_ask(llm, item, _sized(variants[name], block_size)))
        for name in item.names:
            llm.documents.remove(name)
    return [{"method": name} | _summary(rows) for name, rows in found.items()]


def _sized(variant: Variant, block_size: int) -> Variant:
    """With the blocks of the records; EPIC computes as much at the ends as SamKV does."""
    method, settings = variant
    if method == "sam_kv":
        settings = {**settings, "block_size": block_size}
    elif method == "epic":
        settings = {"num_initial": block_size, "num_local": 2 * block_size}
    return method, settings


def _ask(llm: LLM, item: DocumentItem, variant: Variant) -> dict[str, Any]:
    method, settings = variant
    result = llm.ask(
        item.question,
        list(item.names),
        reuse=make_reuse(method, settings),
        prefix=item.prefix,
        params=_ANSWER,
    )
    stats = result.stats
    shares = result.reused.shares if result.reused else None
    return {
        "exact": exact_match(item, result.text),
        "f1": token_f1(item, result.text),
        "sequence_ratio": 1.0 if stats.sequence_ratio is None else stats.sequence_ratio,
        "recompute_ratio": 1.0 if stats.recompute_ratio is None else stats.recompute_ratio,
        "ttft_ms": stats.ttft_ms,
        "bytes_read": stats.store_bytes_read or 0,
        "share": None if shares is None else statistics.mean(shares),
        "tokens": stats.prompt_tokens,
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the questions; of the time the median."""
    means: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] is not None]
        if name == "ttft_ms":
            means[name] = statistics.median(values)
        else:
            means[name] = statistics.fmean(values) if values else None
    return means


if __name__ == "__main__":
    main()

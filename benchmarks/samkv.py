"""Questions over stored documents: right answers, tokens kept, recomputed and read, and time.

    python -m benchmarks.samkv [--items 200] [--kinds one ...] [--shapes 8x512 ...] [--ablation]
    python -m benchmarks.samkv --render

The bundled model answers the same questions under every method, one request at a time, with the
methods interleaved. Documents are encoded once and read from a store on disk; no prefix is cached.
A cell is a kind of question and a shape, documents x words. A finished cell adds a line to
benchmarks/results/samkv.jsonl, so the same command resumes an interrupted run (`--again` measures
existing cells again). If a cell lacks some methods, only these and `recompute` are measured, on the
same questions; their line is added to the cell. `--render` writes docs/samkv.md and its figures.
Seeds count from 0.

    python -m benchmarks.samkv --equal [--items 100] [--model tiny-hops|keyhole-scratch-1]

measures methods at equal budgets instead, over shorter documents with the needed sentences anywhere
in them, and adds whole cells to benchmarks/results/samkv-equal.jsonl: on each question,
`multi_infllm` and random blocks keep as many tokens as SamKV, and `cacheblend` recomputes as many.
With another model the needed sentences stand in the middle, first among unrelated ones, then in
paragraphs about one name each, and lines go to benchmarks/results/samkv-hops.jsonl or
samkv-scratch.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

import benchmarks
from benchmarks import command
from benchmarks.document_reuse import equal as document_equal
from benchmarks.document_reuse import page
from benchmarks.document_reuse.methods import ABLATION, EQUAL, METHODS, Variant
from keyhole import LLM, SamplingParams
from keyhole.eval.tiny_language.documents import DocumentItem, exact_match, make
from keyhole.reuse import make_reuse

#: Kind of question, and the position of the needed sentences in their documents.
KINDS = (
    "one/ends",
    "one/middle",
    "two_hop/ends",
    "two_hop/middle",
    "needs_each_other/ends",
    "needs_each_other/middle",
)
SHAPES = ("4x512", "8x512", "16x512", "4x1536")
OUTPUT = benchmarks.results() / "samkv.jsonl"
EQUAL_KINDS = ("one/anywhere", "two_hop/anywhere", "needs_each_other/anywhere")
EQUAL_SHAPE = "4x320"
#: A third part, `subjects`, is for documents of paragraphs about one name each.
MIDDLE_KINDS = (*KINDS[1::2], *(f"{kind}/subjects" for kind in KINDS[1::2]))


class MeasuredModel(NamedTuple):
    """A model, and what is measured of it at equal budgets.

    path: what LLM loads. comments: around its tables of docs/samkv.md.
    """

    path: str
    kinds: tuple[str, ...]
    output: Path
    comments: tuple[str, str]


MODELS = {
    "tiny": MeasuredModel(
        "tiny", EQUAL_KINDS, benchmarks.results() / "samkv-equal.jsonl", document_equal.TINY
    ),
    "tiny-hops": MeasuredModel(
        "tiny-hops", MIDDLE_KINDS, benchmarks.results() / "samkv-hops.jsonl", document_equal.HOPS
    ),
    "keyhole-scratch-1": MeasuredModel(
        str(benchmarks.ROOT / "recipes/tiny_model/keyhole-scratch-1"),
        MIDDLE_KINDS,
        benchmarks.results() / "samkv-scratch.jsonl",
        document_equal.SCRATCH,
    ),
}
# Three blocks of 64 would already be two fifths of 512 words.
_BLOCK_SIZE = {320: 16, 512: 32}
# The longest answer has thirteen words.
_ANSWER = SamplingParams(max_tokens=16, temperature=0.0)


def main() -> None:
    """Reads the command line, measures and stores."""
    parser = command.parser(__doc__)
    parser.add_argument("--items", type=int, help="default: 200, and 100 with --equal")
    parser.add_argument("--model", default="tiny", choices=MODELS)
    kinds = (*KINDS, *EQUAL_KINDS, *MIDDLE_KINDS[3:])
    parser.add_argument("--kinds", nargs="+", choices=kinds)
    parser.add_argument("--shapes", nargs="+")
    parser.add_argument("--equal", action="store_true", help="methods at equal budgets")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    parser.add_argument("--ablation", action="store_true", help="also ablate SamKV")
    parser.add_argument("--again", action="store_true", help="measure stored cells again")
    parser.add_argument("--output", type=Path, help="add lines to this file instead")
    parser.add_argument("--render", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    equal, model = arguments.equal, MODELS[arguments.model]
    if arguments.model != "tiny" and not equal:
        parser.error(f"--model {arguments.model} is measured at equal budgets only; add --equal")
    arguments.items = arguments.items or (100 if equal else 200)
    arguments.output = arguments.output or (model.output if equal else OUTPUT)
    if not arguments.render:
        # Times are reported relative to recompute.
        names = ("recompute", *arguments.methods)
        variants = {name: variant for name, variant in METHODS.items() if name in names}
        if arguments.ablation:
            variants |= ABLATION
        if equal:
            variants = {name: variant for name, (variant, _) in EQUAL.items()}
        usual = model.kinds if equal else KINDS
        with tempfile.TemporaryDirectory() as folder:
            llm = LLM(model.path, device="cpu", prefix_cache=False, documents=folder)
            for shape in arguments.shapes or ((EQUAL_SHAPE,) if equal else SHAPES):
                for kind in arguments.kinds or usual:
                    _cell(llm, kind, shape, variants, arguments)
    docs = benchmarks.ROOT / "docs"
    page.write(page.stored(OUTPUT), docs)
    every = [document_equal.stored(model.output) for model in MODELS.values()]
    for model, lines in zip(MODELS.values(), every, strict=True):
        document_equal.write(lines, docs, model.comments)
    document_equal.write_together(every, docs)


def _cell(
    llm: LLM, kind: str, shape: str, variants: dict[str, Variant], arguments: argparse.Namespace
) -> None:
    """Measures one cell unless it is stored; at equal budgets, if the arguments say so."""
    block_size, items = _BLOCK_SIZE.get(int(shape.split("x")[1]), 64), arguments.items
    equal = arguments.equal
    known = (document_equal if equal else page).stored(arguments.output).get((kind, shape))
    if known is not None and not arguments.again and known["items"] >= items:
        there = {result["method"] for result in known["results"]}
        missing = {name: variant for name, variant in variants.items() if name not in there}
        if equal or not missing:
            print(f"{kind} {shape}: there already", file=sys.stderr)
            return
        if known["block_size"] == block_size:
            # The same questions, and the reference for times.
            variants, items = {"recompute": variants["recompute"]} | missing, known["items"]
    line = command.header("samkv", "benchmarks.samkv", arguments.note)
    line |= {"kind": kind, "shape": shape, "items": items, "block_size": block_size}
    matches = {name: other for name, (_, other) in EQUAL.items() if equal and other is not None}
    line["results"] = count(llm, kind, shape, variants, items, block_size, matches)
    benchmarks.append(arguments.output, line)
    print(page.cell(line), flush=True)


def token_f1(item: DocumentItem, generated: str) -> float:
    """Harmonic mean of precision and recall of words.

    As in SQuAD, words count as often as they occur; `done` and what follows it do not.
    """
    wrote = Counter(generated.partition("done")[0].split())
    right = Counter(item.answer.partition("done")[0].split())
    common = (wrote & right).total()
    return 2 * common / (wrote.total() + right.total())


def count(
    llm: LLM,
    kind: str,
    shape: str,
    variants: dict[str, Variant],
    items: int,
    block_size: int,
    matches: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """A result per method over the first `items` items of a cell.

    matches: variant -> the variant whose budget it gets on each question. Results then say of every
    item whether it was right.
    """
    matches = matches or {}
    question, where, *subjects = kind.split("/")
    number, words = map(int, shape.split("x"))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for seed in tqdm(range(items), desc=f"{kind} {shape}", disable=None):
        item = make(
            question,
            where=where,
            num_documents=number,
            words=words,
            seed=seed,
            subjects=bool(subjects),
        )
        for name, text in zip(item.names, item.documents, strict=True):
            llm.documents.add(name, text, block_size=block_size)
        # The first one has the coldest caches, so the order rotates; variants with a budget of
        # their own run before the others.
        order = list(variants)
        order = order[seed % len(order) :] + order[: seed % len(order)]
        for name in sorted(order, key=lambda name: name in matches):
            variant = _sized(variants[name], block_size)
            if name in matches:
                variant = _matched(variant, found[matches[name]][-1], seed)
            found[name].append(_ask(llm, item, variant))
        for name in item.names:
            llm.documents.remove(name)
    results = [{"method": name} | _summary(rows) for name, rows in found.items()]
    if matches:
        for result in results:
            result["right"] = [int(row["exact"]) for row in found[result["method"]]]
    return results


def _matched(variant: Variant, other: Mapping[str, Any], seed: int) -> Variant:
    """The method with as many kept or recomputed tokens as another variant on this question."""
    method, settings = variant
    if method == "multi_infllm":
        return method, {**settings, "sequence_ratio": other["sequence_ratio"]}
    if method == "cacheblend":
        return method, {**settings, "recompute_ratio": other["recompute_ratio"]}
    return method, {**settings, "draw": seed}


def _sized(variant: Variant, block_size: int) -> Variant:
    """The method with the records' block size; EPIC recomputes as much at the ends as SamKV."""
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
    """Means over the questions; the median for times."""
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

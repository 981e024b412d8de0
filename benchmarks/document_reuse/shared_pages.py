"""What questions that run at once share of their pages under SamKV, and what other layouts could.

    python -m benchmarks.document_reuse.shared_pages [--model tiny-hops] [--share 0.3]

Eight questions over the same four documents of 1,600 words. For each ordered pair, shares of what
the first one keeps, in tokens of all layers; the line has their means:

unchanged: stored numbers, as they were read, not computed again.
shared: pages that the second question takes as they are (`filled_pages.page_keys`).
in_each_layer: unchanged in both, layer by layer: page lists per layer could share it.
in_all_layers: unchanged in both and in every layer: pages of one block could share it.
paired: pages that could be shared if unchanged blocks had pages of their own, paired over the
layers in their order by the first question, and the second one followed its layout: those of which
the second question keeps every block.

Adds a line to benchmarks/results/shared-pages.jsonl; nothing is timed.
"""

from __future__ import annotations

import itertools
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

import benchmarks
from benchmarks import command
from keyhole import LLM, SamKV, SamplingParams
from keyhole.cache.packing import Packing
from keyhole.engine.documents.filled_pages import page_keys
from keyhole.engine.documents.prompt import assemble
from keyhole.eval.tiny_language.documents import MIN_WORDS, make
from keyhole.reuse.base import RecomputePlan

OUTPUT = benchmarks.results() / "shared-pages.jsonl"
_DOCUMENTS, _QUESTIONS, _WORDS = 4, 8, 1600


@dataclass(frozen=True)
class Kept:
    """What a question keeps: bool [L, T], and unchanged ones of these; the keys of its pages."""

    kept: np.ndarray
    unchanged: np.ndarray
    pages: set[bytes]


def main() -> None:
    """Reads the command line, measures and stores."""
    parser = command.parser(__doc__, OUTPUT)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--share", type=float, help="as SamKV's setting; default: its P")
    arguments = parser.parse_args()
    line = command.header("shared pages", "benchmarks.document_reuse.shared_pages", arguments.note)
    line |= {"model": arguments.model, "share": arguments.share, "words": _WORDS}
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(arguments.model, device="cpu", prefix_cache=False, documents=folder)
        method = SamKV(share=arguments.share)
        line |= {"layers": llm.engine.geometry.num_layers} | measured(llm, method, _WORDS)
    benchmarks.append(arguments.output, line)
    print(line)


def measured(llm: LLM, method: SamKV, words: int) -> dict[str, float]:
    """The means over all ordered pairs of questions, as the module says."""
    item = make("one", num_documents=_DOCUMENTS, words=words, seed=0)
    names = [str(number) for number in range(_DOCUMENTS)]
    for name, text in zip(names, item.documents, strict=True):
        llm.documents.add(name, text)
    asked = (
        make("one", num_documents=2, words=MIN_WORDS, seed=seed).question
        for seed in range(4 * _QUESTIONS)
    )
    questions = list(dict.fromkeys(asked))[:_QUESTIONS]
    found = [kept_by(llm, question, names, method) for question in questions]
    pairs = itertools.permutations(found, 2)
    each = [common(one, other, method.block_size) for one, other in pairs]
    return {name: float(np.mean([pair[name] for pair in each])) for name in each[0]}


def kept_by(llm: LLM, question: str, names: list[str], method: SamKV) -> Kept:
    """Asks a question, and finds the keys of the pages that it filled."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    reused = llm.ask(question, names, reuse=method, params=params).reused
    assert reused is not None
    plan = RecomputePlan(reused.kept, reused.recomputed)
    geometry = llm.engine.geometry
    with ExitStack() as stack:
        resolved = method.resolve(geometry)
        prompt = assemble(llm.engine, llm.documents, names, question, resolved, stack)
        assert prompt.context is not None
        everywhere = torch.ones(len(plan.kept), prompt.context.end, dtype=torch.bool)
        everywhere[:, prompt.context.positions] = plan.kept
        packing = Packing.of(everywhere, geometry)
        tokens = np.asarray(prompt.tokens, np.int64)
        keys = page_keys(prompt.context, tokens, plan, packing, geometry.page_size)
        pages = {key.digest for key in keys}
    return Kept(plan.kept.numpy(), (plan.kept & ~plan.recomputed).numpy(), pages)


def common(one: Kept, other: Kept, block_size: int) -> dict[str, float]:
    """Shares of what one question keeps, by name."""
    both, layers = one.unchanged & other.unchanged, len(one.kept)
    rows = zip(*(blocks(layer, block_size) for layer in one.unchanged), strict=False)
    theirs = [set(blocks(layer, block_size)) for layer in other.unchanged]
    paired = sum(all(block in own for block, own in zip(row, theirs, strict=True)) for row in rows)
    tokens = {
        "unchanged": one.unchanged.sum(),
        "in_each_layer": both.sum(),
        "in_all_layers": layers * both.all(0).sum(),
        "paired": paired * layers * block_size,
    }
    found = {name: float(count / one.kept.sum()) for name, count in tokens.items()}
    return found | {"shared": len(one.pages & other.pages) / len(one.pages)}


def blocks(unchanged: np.ndarray, block_size: int) -> list[int]:
    """The whole blocks that a layer keeps, with at most one token computed again; bool [T]."""
    whole = unchanged[: len(unchanged) // block_size * block_size].reshape(-1, block_size)
    found: list[int] = np.flatnonzero(whole.sum(1) >= block_size - 1).tolist()
    return found


if __name__ == "__main__":
    main()

"""Whether SamKV's block statistics depend on the position in a document, and what a question keeps.

    python -m benchmarks.document_reuse.choice [--documents 8] [--questions 8] [--output FILE]

Documents of 1,536 random words of the bundled model's language are encoded; no block of 64 differs
from another by more than chance. Per layer: the slope of alpha over the middle blocks, from the
middle of a document to its end, with its standard error; the same of the received attention,
divided by its mean. Then questions over 4 documents of 512 words: the share of their tokens that a
layer keeps, that any layer keeps, and that have allocated pages. Adds a line to
benchmarks/results/samkv-choice.jsonl.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

import benchmarks
import keyhole
from benchmarks import command
from keyhole import LLM, SamKV, SamplingParams
from keyhole.engine.documents.encoder import encode
from keyhole.eval.tiny_language.documents import make

OUTPUT = benchmarks.results() / "samkv-choice.jsonl"
_WORDS, _BLOCK = 1536, 64


def main() -> None:
    """Reads the command line, measures and stores."""
    parser = command.parser(__doc__, OUTPUT)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--questions", type=int, default=8)
    arguments = parser.parse_args()
    line = command.header("samkv choice", "benchmarks.document_reuse.choice", arguments.note)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(keyhole.tiny(), device="cpu", prefix_cache=False, documents=folder)
        line |= {"documents": arguments.documents, "layers": _layers(llm, arguments.documents)}
        line |= {"questions": arguments.questions, "held": _held(llm, arguments.questions)}
    benchmarks.append(arguments.output, line)
    print(line)


def _layers(llm: LLM, number: int) -> list[dict[str, float]]:
    """The trend of each layer's statistics along the document."""
    alphas, received = [], []
    for seed in range(number):
        item = make("one", num_documents=2, words=_WORDS, seed=seed, where="ends")
        model = llm.engine.model
        ids = model.tokenizer.encode(item.documents[0], add_special_tokens=False)
        tokens = np.asarray(ids, np.int64)
        with torch.no_grad():
            record = encode(model, llm.engine.cache, tokens, block_size=_BLOCK, chunk=512)
        alphas.append(torch.stack([layer.alpha[1:-2] for layer in record.layers]))
        received.append(torch.stack([layer.received[1:-2] for layer in record.layers]))
    level = torch.stack(received).double()
    trends = _trend(torch.stack(alphas).double()), _trend(level / level.mean(2, keepdim=True))
    names = ("alpha_slope", "alpha_error", "received_slope", "received_error")
    columns = [values.tolist() for trend in trends for values in trend]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _trend(values: Tensor) -> tuple[Tensor, Tensor]:
    """The slope of each layer over half a document, and its standard error; values [S, L, N]."""
    place = torch.linspace(-1, 1, values.shape[2], dtype=torch.float64)
    slopes = values @ place / place.square().sum()
    return slopes.mean(0), slopes.std(0) / len(slopes) ** 0.5


def _held(llm: LLM, number: int) -> dict[str, Any]:
    """Means over questions."""
    rows = []
    for seed in range(number):
        item = make("one", num_documents=4, words=512, seed=seed, where="middle")
        for name, text in zip(item.names, item.documents, strict=True):
            llm.documents.add(name, text, block_size=32)
        params = SamplingParams(max_tokens=2)
        found = llm.ask(item.question, list(item.names), reuse=SamKV(block_size=32), params=params)
        assert found.reused is not None
        union = float(found.reused.kept.any(0).float().mean())
        rows.append((found.reused.sequence_ratio, union, found.reused.held_ratio))
    means = np.mean(rows, axis=0).tolist()
    return dict(zip(("kept", "kept_by_any_layer", "held"), means, strict=True))


if __name__ == "__main__":
    main()

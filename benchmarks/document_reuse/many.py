"""Time of a question over few and many stored documents, against computing the whole prompt.

    python -m benchmarks.document_reuse.many [--sizes 2x512 16x512 100x128 1000x16] [--repeat 5]

The bundled model; documents of random tokens, stored once. A time is that of the whole call
`llm.ask`, opening included, to the first token. "first": of an engine that has not opened these
documents before, though the operating system may have their files in memory; the others are
interleaved, and the median ratio to `recompute` in the same round is printed and stored with them.
Adds a line to benchmarks/results/documents-many.jsonl.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

import benchmarks
import keyhole
from benchmarks import command
from benchmarks.document_reuse.prompt_time import ratios
from keyhole import LLM, SamplingParams
from keyhole.bench.measure import Turn, take_turns
from keyhole.reuse import available_reuse_methods

_FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_QUESTION = 16
# Longer than `keyhole.documents.storage` waits before it trusts the times of a file.
_SETTLE_S = 2.5


def main() -> None:
    """Measures, prints and stores."""
    parser = command.parser(__doc__, benchmarks.results() / "documents-many.jsonl")
    sizes = ("2x512", "16x512", "100x128", "1000x16")
    parser.add_argument("--sizes", nargs="+", default=sizes, metavar="DOCUMENTSxTOKENS")
    parser.add_argument("--methods", nargs="+", default=tuple(available_reuse_methods()))
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    line = command.header("documents many", "benchmarks.document_reuse.many", arguments.note)
    line["threads"] = torch.get_num_threads()
    line["sizes"] = []
    for size in arguments.sizes:
        number, tokens = map(int, size.split("x"))
        found = _measure(number, tokens, arguments.methods, arguments.repeat)
        line["sizes"].append(found)
        for name, ratio in found["by_recompute"].items():
            first = found["first_ms"][name] / found["first_ms"]["recompute"]
            print(f"{size}: {name} {ratio:.3f} of recomputing, the first time {first:.3f}")
    benchmarks.append(arguments.output, line)


def _measure(number: int, tokens: int, methods: list[str], repeat: int) -> dict[str, Any]:
    """Times of all methods over `number` documents of `tokens` tokens each."""
    methods = ["recompute", *(name for name in methods if name != "recompute")]
    with tempfile.TemporaryDirectory() as folder:
        llm = _engine(folder)
        generator = torch.Generator().manual_seed(0)
        shape = (number, tokens)
        texts = torch.randint(3, llm.engine.model.vocab_size, shape, generator=generator).tolist()
        question = {"prompt_token_ids": texts[0][:_QUESTION]}
        names = [f"document {i}" for i in range(number)]
        for name, text in tqdm([*zip(names, texts, strict=True)], desc="store", disable=None):
            llm.documents.add(name, {"prompt_token_ids": text})
        time.sleep(_SETTLE_S)
        first = {}
        for method in methods:
            fresh = _engine(folder)
            begin = time.perf_counter()
            fresh.ask(question, names, reuse=method, params=_FIRST_TOKEN)
            first[method] = 1000 * (time.perf_counter() - begin)
        asked = partial(llm.ask, question, names, params=_FIRST_TOKEN)
        turns = {method: Turn(call=partial(asked, reuse=method)) for method in methods}
        times = take_turns(turns, 1 + repeat, torch.device("cpu"))
    results = [{"system": name, "all_ttft_ms": times[name][1:]} for name in methods]
    return {
        "documents": number,
        "tokens": tokens,
        "first_ms": first,
        "results": results,
        "by_recompute": ratios(results),
    }


def _engine(folder: str) -> LLM:
    return LLM(keyhole.tiny(), device="cpu", prefix_cache=False, max_batch=1, documents=folder)


if __name__ == "__main__":
    main()

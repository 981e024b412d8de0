"""Time to the first token over stored documents, in a model with random weights, on this machine.

    python -m benchmarks.document_reuse.prompt_time [--shape llama-100m] [--documents 4]
        [--tokens 512] [--repeat 7]

The methods are interleaved (`benchmarks.paper.documents`); each method's median ratio to
`recompute` in the same round is printed and stored with the times. Adds a line to
benchmarks/results/documents.jsonl.
"""

from __future__ import annotations

from typing import Any

import benchmarks
from benchmarks import command
from benchmarks.paper import documents
from benchmarks.paper.documents import RECOMPUTE
from benchmarks.paper.settings import DocumentSettings
from keyhole.bench import measure
from keyhole.bench.settings import SHAPES


def main() -> None:
    """Measures, prints and stores."""
    parser = command.parser(__doc__, benchmarks.results() / "documents.jsonl")
    methods = (RECOMPUTE, "reuse", "cacheblend", "epic", "sam_kv")
    parser.add_argument("--methods", nargs="+", default=methods, metavar="METHOD")
    parser.add_argument("--shape", default="llama-100m", choices=SHAPES)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of each document")
    parser.add_argument("--question", type=int, default=32, help="tokens of the question")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    settings = DocumentSettings(
        methods=(RECOMPUTE, *(name for name in arguments.methods if name != RECOMPUTE)),
        documents=arguments.documents,
        tokens=arguments.tokens,
        question=arguments.question,
        repeat=arguments.repeat,
        shape=arguments.shape,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    device = measure.device(arguments.device)
    line = command.header(
        "documents", "benchmarks.document_reuse.prompt_time", arguments.note, device
    )
    line |= documents.run(settings, lambda *_: None)
    line["by_recompute"] = ratios(line["results"])
    benchmarks.append(arguments.output, line)
    for name, ratio in line["by_recompute"].items():
        print(f"{name}: {ratio:.3f} of the time of computing everything")


def ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    """Per system, the median over rounds of its time divided by that of `recompute`."""
    times = {result["system"]: result["all_ttft_ms"] for result in results}
    return {
        name: measure.median_ratio(found, times[RECOMPUTE])
        for name, found in times.items()
        if name != RECOMPUTE
    }


if __name__ == "__main__":
    main()

"""How many tokens a step of "tiny-hops" makes with its own EAGLE-3 draft, and at what speed.

    python -m benchmarks.serving.bundled_draft

Each text is an item of a task with the first part of its right answer, so that the model writes the
last tokens of a text of the stated length. All proposals are verified by real steps: nothing is
simulated. Systems: `full` without a draft, with prompt look-up (`ngram`) and with the draft, and
`spe_context`, for which the same draft, or the head that is pruned from it, selects a quarter of
the text, or another share. Any other policy can be named, with its settings and `+eagle3` or
`+ngram`. The seeds are those of evaluations. One line is added to
benchmarks/results/bundled-draft.jsonl.

The model's eight narrow layers cost little more than the steps of the draft, so tokens per second
say nothing about large models.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import benchmarks
from benchmarks import command
from keyhole import LLM, SamplingParams
from keyhole.eval.tiny_language.tasks import make
from keyhole.policies import make_policy

LENGTHS = (512, 2048, 8192)
TASKS = ("derive", "walk", "walk2", "multiquery")
#: "walk" runs out of names in longer texts.
LONGEST = {"walk": 2048, "walk2": 2048}
#: Words that the model writes at the end of a text.
WRITTEN = 128
SYSTEMS = (
    "full",
    "full+ngram",
    "full+eagle3",
    "spe_context+eagle3",
    "spe_context:full_layers=0,1+eagle3",
)


def main() -> int:
    """Measures, prints and stores every task, length and system."""
    parser = command.parser(__doc__)
    parser.add_argument("--model", default="tiny-hops")
    parser.add_argument("--lengths", type=int, nargs="+", default=[*LENGTHS])
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    parser.add_argument(
        "--systems", nargs="+", default=[*SYSTEMS], help="POLICY[:SETTINGS][+DRAFT]"
    )
    parser.add_argument(
        "--shares", type=int, nargs="+", default=[4], help="a step reads length / SHARE tokens"
    )
    parser.add_argument("--items", type=int, default=4, help="of a task at a length")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--dry", action="store_true", help="store nothing")
    arguments = parser.parse_args()
    line = command.header("bundled-draft", "benchmarks.serving.bundled_draft", arguments.note)
    line |= {"settings": vars(arguments) | {"written": WRITTEN}, "results": []}
    for length in arguments.lengths:
        for system, share in itertools.product(arguments.systems, arguments.shares):
            if system.startswith("full") and share != arguments.shares[0]:
                continue
            llm = opened(system, length // share, arguments)
            for task in arguments.tasks:
                if length <= LONGEST.get(task, length):
                    result = decode(llm, task, length, arguments.items)
                    line["results"].append({"system": system, "share": share} | result)
                    print(told(line["results"][-1]), flush=True)
    if not arguments.dry:
        benchmarks.append(benchmarks.results() / "bundled-draft.jsonl", line)
    return 0


def opened(system: str, token_budget: int, arguments: argparse.Namespace) -> LLM:
    """The model under a policy, with or without a draft."""
    policy, _, draft = system.partition("+")
    budget = {} if policy == "full" else {"token_budget": token_budget}
    return LLM(
        arguments.model,
        policy=make_policy(policy, budget),
        draft=draft or None,
        num_draft_tokens=arguments.num_draft_tokens,
    )


def decode(llm: LLM, task: str, length: int, items: int) -> dict[str, Any]:
    """One request after the other: tokens per step of each, and tokens per second of all."""
    accepted, tokens, right, seconds = [], 0, 0, 0.0
    for seed in range(items):
        item = make(task, length, seed)
        answer = item.answer.split()
        given = max(0, len(answer) - WRITTEN)
        prompt = " ".join([item.prompt, *answer[:given]])
        begin = time.perf_counter()
        found = llm.generate(prompt, SamplingParams(max_tokens=len(answer) - given))
        stats = found.stats
        seconds += time.perf_counter() - begin - (stats.ttft_ms or 0) / 1e3
        tokens += stats.generated_tokens - 1  # the first one comes with the prompt
        right += found.text.split() == answer[given:]
        accepted.append(stats.accepted_length or 1.0)
    return {
        "task": task,
        "length": length,
        "items": items,
        "right": right,
        "accepted_lengths": accepted,
        "tokens_per_second": tokens / seconds,
    }


def told(result: dict[str, Any]) -> str:
    """One result as a line of text."""
    accepted = statistics.fmean(result["accepted_lengths"])
    return (
        f"{result['length']:6,} {result['task']:10} 1/{result['share']} {result['system']:34} "
        f"{accepted:.2f} tokens a step, {result['tokens_per_second']:6.1f} tokens/s, "
        f"{result['right']} of {result['items']} right"
    )


if __name__ == "__main__":
    raise SystemExit(main())

"""Right answers of the bundled model when a step reads an eighth or a quarter of the text.

    python -m benchmarks.head_tasks [--items 64] ["trained on attention=FOLDER" ...]

Every policy gets the same items, decoded greedily; budgets are shares of an item's nominal number
of words. Each argument names a further head for spe_context and its folder. Adds a line to
benchmarks/results/head-tasks.jsonl and prints it as a table; `--render` does only the latter, from
the last line. Seeds are those of evaluations: they count from 0.
"""

from __future__ import annotations

from tqdm import tqdm

import benchmarks
import keyhole
from benchmarks import command
from benchmarks.results_page import head_table
from keyhole import LLM, SamplingParams
from keyhole.eval.tiny_language.tasks import Item, is_correct, make
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import make_policy

CASES = (("recall", 512), ("recall", 2048), ("derive", 512), ("derive", 1024))
POLICIES = ("spe_context", "delta", "quest", "streaming_llm")
SHARES = (8, 4)
OUTPUT = benchmarks.results() / "head-tasks.jsonl"


def main() -> None:
    """Reads the command line, measures and stores."""
    parser = command.parser(__doc__)
    parser.add_argument("heads", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--render", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    if not arguments.render:
        line = command.header("head_tasks", "benchmarks.head_tasks", arguments.note)
        heads = dict(name.split("=", 1) for name in arguments.heads)
        line["results"] = count(heads, arguments.items)
        benchmarks.append(OUTPUT, line)
    print(head_table.tasks(benchmarks.read_lines(OUTPUT)[-1]))


def count(heads: dict[str, str], items: int) -> list[dict[str, object]]:
    """One cell per task, length, policy or further head, and share of the words."""
    model = load(keyhole.tiny(), "cpu")
    choosers: list[tuple[str, str, dict[str, str]]] = [(name, name, {}) for name in POLICIES]
    choosers[1:1] = [
        (f"spe_context, {name}", "spe_context", {"head": path}) for name, path in heads.items()
    ]
    work = [
        (task, words, share, chooser)
        for task, words in CASES
        for share, chooser in [
            (1, ("full", "full", {})),
            *((s, c) for s in SHARES for c in choosers),
        ]
    ]
    results: list[dict[str, object]] = []
    for task, words, share, (name, policy, settings) in tqdm(work, unit="cell"):
        asked = [make(task, words, seed) for seed in range(items)]
        budget = {} if policy == "full" else {"token_budget": words // share}
        cell = {"task": task, "words": words, "policy": name, "share": share}
        results.append(
            {**cell, "right": right(model, policy, settings | budget, asked), "of": items}
        )
    return results


def right(model: Model, policy: str, settings: dict[str, object], asked: list[Item]) -> int:
    """How many items are answered exactly right."""
    llm = LLM(model, policy=make_policy(policy, settings), max_batch=16)
    longest = max(len(item.answer.split()) for item in asked)
    params = SamplingParams(max_tokens=longest + 8, temperature=0.0)
    results = llm.generate([item.prompt for item in asked], params)
    return sum(is_correct(i, r.text) for i, r in zip(asked, results, strict=True))


if __name__ == "__main__":
    main()

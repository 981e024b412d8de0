"""Right answers of the bundled model when a step reads an eighth, or a quarter, of the text.

    python -m benchmarks.head_tasks [--items 40]

The same items for every policy, decoded greedily; budgets are shares of the words that an item was
made for. Adds a line to benchmarks/results/head-tasks.jsonl. Seeds are those of examinations.
"""

from __future__ import annotations

import argparse
import sys

import torch
from tqdm import tqdm

import keyhole
from keyhole import LLM, SamplingParams
from keyhole.bench import measure
from keyhole.models.loading import load
from keyhole.models.tiny.tasks import is_correct, make
from keyhole.policy import make_policy

CASES = (("recall", 512), ("recall", 2048), ("derive", 512), ("derive", 1024))
POLICIES = ("spe_context", "delta", "quest", "streaming_llm")
SHARES = (8, 4)
_FIRST_SEED = 1_000_000


def main() -> None:
    """Asks, counts and stores."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=40)
    items = parser.parse_args().items
    model = load(keyhole.tiny(), "cpu")
    line = measure.header("head_tasks", torch.device("cpu"), "", keyhole.__version__)
    line["command"] = " ".join(["python -m benchmarks.head_tasks", *sys.argv[1:]])
    line["results"] = []
    work = [
        (task, words, share, name)
        for task, words in CASES
        for share, name in [(1, "full"), *((s, p) for s in SHARES for p in POLICIES)]
    ]
    for task, words, share, name in tqdm(work, unit="cell"):
        asked = [make(task, words, _FIRST_SEED + seed) for seed in range(items)]
        settings = {} if name == "full" else {"token_budget": words // share}
        llm = LLM(model, policy=make_policy(name, settings), max_batch=16)
        longest = max(len(item.answer.split()) for item in asked)
        params = SamplingParams(max_tokens=longest + 8, temperature=0.0)
        results = llm.generate([item.prompt for item in asked], params)
        right = sum(is_correct(i, r.text) for i, r in zip(asked, results, strict=True))
        line["results"].append(
            {
                "task": task,
                "words": words,
                "policy": name,
                "share": share,
                "right": right,
                "of": items,
            }
        )
    measure.append(measure.results() / "head-tasks.jsonl", line)
    for cell in line["results"]:
        budget = "everything" if cell["share"] == 1 else f"1/{cell['share']}"
        what = f"{cell['task']:8}{cell['words']:6} {cell['policy']:14}{budget:12}"
        print(f"{what}{cell['right']}/{items}")


if __name__ == "__main__":
    main()

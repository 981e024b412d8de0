"""Measures the share of the bundled model's attention that retrieval heads find.

    python -m benchmarks.head_recall "attention=FOLDER" "eagle, tokens=FOLDER" ...

Each argument names a head and its folder; a head with random weights and the recent window are
measured for comparison. Adds a line to benchmarks/results/head-recall.jsonl, prints the tables
and writes the figure docs/images/head-recall.png. `--render` does only the latter two, from the
last line. Texts are items of the bundled model's tasks with their right answers; the query tokens
are those of the answers, as in decode steps. Seeds are those of evaluations.

`--model tiny-hops` measures the other bundled model, whose lines have a file of their own and no
figure: benchmarks/results/head-recall-hops.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from random import Random

import benchmarks
from benchmarks import command
from benchmarks.results_page import head_table
from keyhole.eval import verify
from keyhole.eval.tiny_language.tasks import make
from keyhole.eval.tiny_language.world import BOS, EOS, WORD_IDS
from keyhole.eval.verify import RecallText
from keyhole.models.loading import load
from keyhole.retrieval.head import RetrievalHead

BUDGETS = (64, 128, 256, 512, 1024)
LENGTHS = (512, 1024, 2048, 4096, 8192)
TASKS = ("recall", "multiquery", "docs2", "majority", "derive")
ITEMS = {8192: 2, 4096: 3}
MOST_ITEMS = 4
MOST_ROWS = 64
OUTPUTS = {
    "tiny": benchmarks.results() / "head-recall.jsonl",
    "tiny-hops": benchmarks.results() / "head-recall-hops.jsonl",
}
PICTURE = benchmarks.ROOT / "docs/images/head-recall.png"


def text(task: str, length: int, seed: int) -> RecallText:
    """An item with its answer; rows: at most MOST_ROWS tokens of the answer."""
    item = make(task, length, seed)
    prompt = [WORD_IDS[word] for word in [BOS, *item.prompt.split()]]
    answer = [WORD_IDS[word] for word in [*item.answer.split(), EOS]]
    places = range(len(prompt), len(prompt) + len(answer) - 1)
    rows = Random(seed).sample(places, min(MOST_ROWS, len(places)))
    return RecallText(token_ids=prompt + answer, rows=sorted(rows))


def main() -> None:
    """Reads the command line, measures and writes."""
    parser = command.parser(__doc__)
    parser.add_argument("heads", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--model", default="tiny", choices=OUTPUTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[*LENGTHS])
    parser.add_argument("--render", action="store_true", help="only write tables and figure")
    arguments = parser.parse_args()
    output = OUTPUTS[arguments.model]
    if not arguments.render:
        benchmarks.append(output, line(arguments))
    last = json.loads(output.read_text().splitlines()[-1])
    if arguments.model == "tiny":
        head_table.picture(last, PICTURE)
    print(head_table.tables(last))


def line(arguments: argparse.Namespace) -> dict[str, object]:
    """The stored line of one run."""
    model = load(arguments.model, "cpu", "float32")
    lengths = arguments.lengths
    places = dict(name.split("=", 1) for name in arguments.heads)
    heads = {n: RetrievalHead.from_pretrained(path, model.network) for n, path in places.items()}
    for inputs in ("tokens+features", "tokens"):
        heads[f"random, {inputs}"] = RetrievalHead.random(model.network, inputs=inputs)
    texts = {
        n: [text(task, n, seed) for task in TASKS for seed in range(ITEMS.get(n, MOST_ITEMS))]
        for n in lengths
    }
    cells = verify.measure_recall(model, heads, texts, BUDGETS)
    header = command.header("head-recall", "benchmarks.head_recall", arguments.note, model.device)
    settings = {"model": model.name, "budgets": BUDGETS, "lengths": lengths, "tasks": TASKS}
    settings |= {"rows": MOST_ROWS, "items": ITEMS, "most_items": MOST_ITEMS}
    configs = {name: dataclasses.asdict(head.config) for name, head in heads.items()}
    results = [dataclasses.asdict(cell) for cell in cells]
    return {**header, "settings": settings, "heads": configs, "results": results}


if __name__ == "__main__":
    main()

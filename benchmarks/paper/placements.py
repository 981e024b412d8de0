"""Where the calibrations would place DELTA's selection layers.

    python -m benchmarks.paper.placements [--model tiny-hops] [--items 3]

The decode steps of each task are measured under full attention as `keyhole calibrate` does. Layer 0
is dense, layer 1 selects first, and a second selection layer goes where attention shifts most from
one layer to the next (the paper's criterion), where the sparse layers keep most of their
attention, or where their output changes least. A line per task is added to
benchmarks/results/hops-calibration.jsonl or scratch-calibration.jsonl; the parts `hops-placements`
and `scratch-placements` of `benchmarks.claims` measure what every placement answers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import benchmarks
from benchmarks import command
from benchmarks.claims import SCRATCH_MODEL, SELECTION_LAYERS
from benchmarks.results_page.controls import HOPS, SCRATCH
from keyhole.eval.calibrate import measured
from keyhole.eval.tiny_language.tasks import make
from keyhole.models.loading import load
from keyhole.models.model import Model

TASKS = ("walk2", "derive", "walk")
#: The prefix of a model's files, and where it is.
MODELS = {"tiny-hops": (HOPS, "tiny-hops"), "keyhole-scratch": (SCRATCH, SCRATCH_MODEL)}
_LENGTH, _BUDGET, _RECENT_PAGES = 1024, 128, 2
#: First seed, as in `keyhole calibrate`: evaluations count from 0.
_FIRST_SEED = 2_000_000
_FULL_LAYERS = (0,)


def main() -> None:
    """Measures every task, and adds its line."""
    parser = command.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny-hops")
    parser.add_argument("--items", type=int, default=3, help="texts of each task")
    parser.add_argument("--max-tokens", type=int, default=256, help="decode steps of a text")
    arguments = parser.parse_args()
    prefix, path = MODELS[arguments.model]
    model = load(path, "cpu")
    for task in TASKS:
        line = command.header("placements", "benchmarks.paper.placements", arguments.note)
        line |= {"task": f"tiny_{task}", "length": _LENGTH, "items": arguments.items}
        line |= run(model, task, _LENGTH, arguments.items, arguments.max_tokens)
        benchmarks.append(benchmarks.results() / f"{prefix}calibration.jsonl", line)
        print(task, line["placed"], line["costs"])


def run(model: Model, task: str, length: int, items: int, max_tokens: int) -> dict[str, Any]:
    """The measurement, where each criterion places the second selection layer ("placed"), and what
    each place costs the sparse layers ("costs", by layer).
    """
    prompts = [make(task, length, _FIRST_SEED + item).prompt for item in range(items)]
    found = measured(
        model,
        [*prompts],
        token_budget=_BUDGET,
        recent_pages=_RECENT_PAGES,
        max_tokens=max_tokens,
    )
    placed = {
        "shift": found.place("paper", 2, _FULL_LAYERS),
        "mass": found.place("optimal", 2, _FULL_LAYERS, "mass"),
        "error": found.place("optimal", 2, _FULL_LAYERS, "error"),
    }
    costs = {}
    for layer in SELECTION_LAYERS:
        cost = found.cost(found.expected(_FULL_LAYERS, (1, layer), "given", "mass"))
        costs[str(layer)] = {"mass": cost.recall, "error": cost.error}
    return dataclasses.asdict(found) | {
        "placed": {name: one.delta_layers[1] for name, one in placed.items()},
        "costs": costs,
    }


if __name__ == "__main__":
    main()

"""Measures which layers of a model should choose for DELTA, and what attention the others keep.

The model continues the prompts densely; every placement is judged by the same run. The output file
is what `--layers` takes; named keyhole-delta.json beside the weights, it is used by itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.cli import flags, show
from keyhole.errors import ConfigError
from keyhole.policy.delta import Delta

if TYPE_CHECKING:
    from keyhole.evaluate.calibrate import Measurement
    from keyhole.policy.calibration import Calibration

_SETTINGS = ("token_budget", "recent_pages", "full_layers")
_FULL_LAYERS = (0, 1)
#: Items of the bundled model's tasks; evaluations count from 0, examinations from 1,000,000.
_FIRST_SEED = 2_000_000
_TASKS = (("recall", 2048), ("derive", 1024))
_NUM_ITEMS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole calibrate`."""
    flags.add_model(parser, positional=True)
    parser.add_argument(
        "--method",
        choices=("optimal", "paper"),
        default="optimal",
        help="optimal keeps the most attention, paper goes by the shift between layers",
    )
    parser.add_argument(
        "--num-delta-layers", type=int, default=3, metavar="N", help="layers that choose"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="tokens to generate per prompt"
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="prompts: a JSON string per line of a .jsonl file, or the whole of any other file; "
        "without it tasks of the bundled model",
    )
    parser.add_argument("--output", metavar="FILE", help="write the layers to this JSON file")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the recall")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_settings(parser, Delta, "settings of DELTA", _SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Measures, places, and prints the recall of each layer."""
    settings = flags.settings_of(arguments, Delta)
    full_layers = settings.pop("full_layers", _FULL_LAYERS)
    prompts = _prompts(arguments)
    model = flags.load_model(arguments)
    from keyhole.evaluate import plots
    from keyhole.evaluate.calibrate import measure

    found = measure(model, prompts, max_tokens=arguments.max_tokens, **settings)
    placed = found.place(arguments.method, arguments.num_delta_layers, full_layers)
    if arguments.output:
        placed.save(arguments.output)
    if arguments.plot:
        plots.recall_chart(found, placed, arguments.plot)
    if arguments.json:
        print(show.to_json({**vars(placed), "steps": found.steps, "shift": found.shift}))
    else:
        print(_text(placed, found))
        for path in filter(None, (arguments.output, arguments.plot)):
            print(f"written: {path}")
    return 0


_READS = {
    "window": "its own window",
    "full": "everything",
    "selects": "everything, and chooses",
    "sparse": "the choice of layer {}",
}


def _text(placed: Calibration, found: Measurement) -> str:
    roles = found.roles(placed.full_layers, placed.delta_layers)
    rows = [
        [str(layer), _READS[role.kind].format(role.chooser), f"{recall:.1%}"]
        for layer, (role, recall) in enumerate(zip(roles, placed.recall, strict=True))
    ]
    return (
        f"{placed.model}: {placed.method} placement over {found.steps} decode steps, "
        f"token_budget {placed.token_budget}\n\n"
        f"{show.table(('layer', 'reads', 'attention kept'), rows, left=2)}\n"
    )


def _prompts(arguments: argparse.Namespace) -> list[Any]:
    if arguments.data is None:
        if arguments.model is not None:
            raise ConfigError("give --data FILE with prompts for this model")
        from keyhole.models.tiny.tasks import make

        return [
            make(task, length, _FIRST_SEED + n).prompt
            for n in range(_NUM_ITEMS)
            for task, length in _TASKS
        ]
    try:
        text = Path(arguments.data).read_text()
        if not arguments.data.endswith(".jsonl"):
            return [text]
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data {arguments.data!r} cannot be read: {error}") from error

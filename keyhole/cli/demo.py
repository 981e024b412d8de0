"""Runs a long recall and a long derivation on the bundled model under four methods with one budget.

Each method that selects is shown with its control: the same dense layers and budget, and the newest
tokens instead of a selection. Ends with a picture of the pages that every layer read, if matplotlib
is installed. Works offline, in less than a minute.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import keyhole
from keyhole import drawing
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.terminal import PICTURE, Output, check_outputs
from keyhole.config import bytes_text
from keyhole.errors import ConfigError
from keyhole.models.locate import TINY

if TYPE_CHECKING:
    from keyhole.eval.demo import Demo, DemoOutcome
    from keyhole.eval.tiny_language.tasks import Item
    from keyhole.models.model import Model

_HEADS = ("task", "policy", "answer", "keys read", "step", "read per step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole demo`."""
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="keyhole-demo.png",
        help=f"the picture, {', '.join(PICTURE.starts)}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table, and writes the picture or says what it needs."""
    check_outputs(Output("--output", arguments.output, PICTURE))
    terminal.status(f"loading {TINY} ...")
    flags.quiet()
    missing = _missing()
    from keyhole.eval import demo
    from keyhole.models.loading import load

    model, asked = load(keyhole.tiny()), demo.items()
    found = demo.run(model, asked)
    if not arguments.json:
        print(_text(found, demo.BUDGET), flush=True)
    if missing is None:
        terminal.status(f"\ndrawing {arguments.output} ...")
        _draw(model, asked[-1], found, arguments.output)
    if arguments.json:
        print(_json(found, None if missing else arguments.output, missing))
    else:
        print(f"\n{missing or f'pages read by each layer: {arguments.output}'}")
    return 0


def _missing() -> str | None:
    """Why no picture can be drawn; None if one can."""
    try:
        drawing.matplotlib()
    except ConfigError as error:
        return str(error)
    return None


def _draw(model: Model, item: Item, found: Demo, path: str) -> None:
    from keyhole.eval import demo
    from keyhole.eval.report import layer_charts
    from keyhole.policies.delta import Delta

    delta = found.policies["delta"]
    assert isinstance(delta, Delta)
    trace, prompt_tokens = demo.traced(model, item)
    layer_charts.page_map(
        trace,
        path,
        title=f"What DELTA reads in a derivation, token by token (budget {demo.BUDGET} tokens)",
        prompt_tokens=prompt_tokens,
        delta_layers=delta.delta_layers or (),
    )


def _json(found: Demo, output: str | None, missing: str | None) -> str:
    from keyhole.eval import demo

    return terminal.to_json(
        {
            "outcomes": [vars(outcome) for outcome in found.outcomes],
            "policies": {
                name: terminal.describe(policy) for name, policy in found.policies.items()
            },
            "dense_layers": found.dense,
            "controls": {
                name: terminal.describe(policy) for name, policy in found.controls.items()
            },
            "verdicts": demo.verdicts(found.outcomes),
            "output": output,
            "no_picture": missing,
        }
    )


def _text(found: Demo, budget: int) -> str:
    """The table, and how to read it."""
    from keyhole.eval import demo

    tasks = {outcome.task: outcome.stats for outcome in found.outcomes if outcome.policy == "full"}
    sparse = {name: policy for name, policy in found.policies.items() if name != "full"}
    lines = [
        f"recall: one fact from a text of {tasks['recall'].prompt_tokens} tokens",
        f"derive: a program of {tasks['derive'].prompt_tokens} tokens, carried out in "
        f"{tasks['derive'].generated_tokens} tokens that build on each other",
        f"policies, with a KV budget of {budget} tokens in sparse layers:",
        *(
            f"  {terminal.sentence(policy)}{'' if name in found.controls else ', its own control'}"
            for name, policy in sparse.items()
        ),
        "control: the same dense layers and budget, and the newest tokens in place of a selection",
        "",
        terminal.table(_HEADS, [_row(outcome) for outcome in found.outcomes], left=3),
    ]
    if verdicts := demo.verdicts(found.outcomes):
        lines += ["", *verdicts]
    if len({found.dense[name] for name in sparse}) > 1:
        layers = (f"{name} {terminal.setting(found.dense[name]) or 'none'}" for name in sparse)
        listed = ", ".join(layers)
        lines.append(f"dense layers differ ({listed}): compare a method with its control only")
    lines += [
        f"\nNote: full attention itself is wrong on {outcome.task}, so the other results there "
        "mean little."
        for outcome in found.outcomes
        if outcome.policy == "full" and not outcome.correct
    ]
    return "\n".join(lines)


def _row(outcome: DemoOutcome) -> list[str]:
    stats = outcome.stats
    fraction = stats.attended_fraction
    return [
        outcome.task,
        "  its control" if outcome.is_control else outcome.policy,
        "right" if outcome.correct else "wrong",
        "-" if fraction is None else f"{fraction:.1%}",
        f"{stats.step_ms:.1f} ms",
        bytes_text(terminal.bytes_per_step(stats)),
    ]

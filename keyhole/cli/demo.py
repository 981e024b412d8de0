"""Runs a long recall and a long derivation on the bundled model under four methods, one budget.

Ends with a picture of the pages that every layer read. Works offline, in less than a minute.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import keyhole
from keyhole.cli import flags, show

if TYPE_CHECKING:
    from keyhole.evaluate.demo import Demo

_HEADS = ("task", "policy", "answer", "keys read", "step", "read per step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole demo`."""
    parser.add_argument("--output", metavar="FILE", default="keyhole-demo.png", help="the picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table and writes the picture."""
    flags.quiet()
    from keyhole.evaluate import demo, plots
    from keyhole.models.loading import load

    model = load(keyhole.tiny())
    found = demo.run(model, demo.items())
    delta: Any = found.policies["delta"]
    plots.page_map(
        found.trace,
        arguments.output,
        title=f"What DELTA reads in a derivation, token by token (budget {demo.BUDGET} tokens)",
        prompt_tokens=found.traced_prompt_tokens,
        delta_layers=delta.delta_layers,
    )
    if arguments.json:
        policies = {name: show.describe(policy) for name, policy in found.policies.items()}
        outcomes = [vars(outcome) for outcome in found.outcomes]
        print(
            show.to_json({"outcomes": outcomes, "policies": policies, "output": arguments.output})
        )
        return 0
    print(_text(found, demo.BUDGET))
    print(f"\npages read by each layer: {arguments.output}")
    return 0


def _text(found: Demo, budget: int) -> str:
    """The table and what one should know to read it."""
    tasks = {outcome.task: outcome.stats for outcome in found.outcomes if outcome.policy == "full"}
    lines = [
        f"recall: one fact from a text of {tasks['recall'].prompt_tokens} tokens",
        f"derive: a program of {tasks['derive'].prompt_tokens} tokens, carried out in "
        f"{tasks['derive'].generated_tokens} tokens that build on each other",
        f"every method but full may read {budget} tokens where it is sparse:",
        *(f"  {show.sentence(policy)}" for policy in found.policies.values()),
        "",
        show.table(_HEADS, [_row(outcome) for outcome in found.outcomes], left=3),
    ]
    lines += [
        f"\nNote: full attention itself is wrong on {outcome.task}; there the others say little."
        for outcome in found.outcomes
        if outcome.policy == "full" and not outcome.correct
    ]
    return "\n".join(lines)


def _row(outcome: Any) -> list[str]:
    stats = outcome.stats
    return [
        outcome.task,
        outcome.policy,
        "right" if outcome.correct else "wrong",
        f"{stats.attended_fraction:.1%}",
        f"{stats.step_ms:.1f} ms",
        show.bytes_text(show.bytes_per_step(stats)),
    ]

"""Lists the families of the installed transformers, and which of them the engine runs exactly."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from keyhole.cli.common import terminal

if TYPE_CHECKING:
    from keyhole.exactness_gate import Exactness


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole models`."""
    parser.add_argument(
        "family",
        nargs="*",
        help="model_type of a config, such as qwen3; default: all that generate text",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per family")


def run(arguments: argparse.Namespace) -> int:
    """Measures each family with a small random model; about a second each."""
    from tqdm.auto import tqdm

    from keyhole.cli.common.flags import quiet
    from keyhole.exactness_gate import families_of_transformers, measure_family

    quiet()
    names = arguments.family or families_of_transformers()
    exact = 0
    for name in tqdm(names, unit="family", leave=False, disable=None):
        verdict = measure_family(name)
        exact += verdict.exact
        if arguments.json:
            print(terminal.to_json(_row(verdict)), flush=True)
        else:
            print(f"{name:24} {verdict.reason or 'exact'}", flush=True)
    if not arguments.json:
        print(f"{exact} of {len(names)} families are exact")
    return 0


def _row(verdict: Exactness) -> dict[str, Any]:
    return {
        "family": verdict.family,
        "exact": verdict.exact,
        "error": verdict.error,
        "reason": verdict.reason,
    }

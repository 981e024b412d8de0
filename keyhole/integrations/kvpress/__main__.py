"""Asks a model tasks under kvpress's compressors; see docs/kvpress.md.

Names may have settings: `--presses snapkv:window_size=32,tova --tasks passkey:depth=0.5`. For the
bundled model a task in plain English stands for its form in that model's words. Every cell (task,
length, setup, press, budget) is a line that is added to --output. Exit status 1 if one was refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keyhole
from keyhole.bench import measure
from keyhole.errors import ConfigError, KeyholeError
from keyhole.evaluate.tasks import TINY_FORMS, make_task
from keyhole.integrations.kvpress.evaluation import SETUPS, Cell, Evaluation
from keyhole.integrations.kvpress.presses import make_press, presses
from keyhole.models.loading import load

# A comma inside of a value stands before a number, one between two names before a letter.
_BETWEEN = re.compile(r",(?=\s*[A-Za-z_])")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m keyhole.integrations.kvpress",
        description="Tasks under kvpress's compressors, in the lines of `keyhole eval`.",
    )
    add = parser.add_argument
    add("model", nargs="?", default=keyhole.tiny(), help="folder or hub id; without: the bundled")
    add("--presses", default="snapkv,tova", metavar="NAMES", help=f"of {', '.join(presses())}")
    add("--budgets", default="128,256", metavar="TOKENS", help="kept of a prompt, per KV head")
    add("--interval", type=int, metavar="TOKENS", help="press again after so many generated tokens")
    add("--tasks", default="passkey,key_value", metavar="NAMES", help="as of `keyhole eval`")
    add("--lengths", default="2048", metavar="TOKENS", help="of a sample, its answer included")
    add("--setup", default="prompt", help=f"what is pressed: {', '.join(SETUPS)} or both")
    add("--limit", type=int, default=16, metavar="N", help="samples in a cell")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--output", default="keyhole-eval.jsonl", metavar="FILE", help="where lines are added")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measures all cells, one line each here and in the file."""
    cells = list(_cells(arguments))
    evaluation = Evaluation(load(arguments.model, arguments.device, arguments.dtype))
    refused = 0
    for cell in cells:
        press, length = cell.press, cell.length
        name = f"{cell.task.name} {length} {cell.setup} {press.name} {press.budget}"
        try:
            line = evaluation.line(cell)
        except KeyholeError as error:
            print(f"{name}: refused: {error}", file=sys.stderr)
            refused += 1
            continue
        measure.append(Path(arguments.output), line)
        print(_told(name, line), flush=True)
    return 1 if refused else 0


def _told(name: str, line: Mapping[str, Any]) -> str:
    """A cell for people; without a decode step there is nothing to say of steps."""
    if not line["decode_steps"]:
        return f"{name}: score {line['score']:.3f}"
    return (
        f"{name}: score {line['score']:.3f}, {100 * line['read_share']:.1f} % of keys read, "
        f"{line['step_ms']:.1f} ms a step"
    )


def _cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """All combinations; ConfigError for what cannot be understood."""
    made = [
        make_press(name, budget, settings, arguments.interval)
        for name, settings in _named(arguments.presses)
        for budget in _numbers(arguments.budgets, "--budgets")
    ]
    forms = TINY_FORMS if arguments.model == keyhole.tiny() else {}
    tasks = [make_task(forms.get(name, name), given) for name, given in _named(arguments.tasks)]
    lengths, setups = _numbers(arguments.lengths, "--lengths"), _words(arguments.setup)
    for task, length, setup, press in itertools.product(tasks, lengths, setups, made):
        yield Cell(task=task, length=length, setup=setup, press=press, samples=arguments.limit)


def _named(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and settings of `name:setting=value:setting=value,name`."""
    for part in _BETWEEN.split(text):
        name, *given = part.strip().split(":")
        yield name, dict(_setting(part, one) for one in given)


def _setting(part: str, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if equals:
            return name, json.loads(value)
    except ValueError:
        pass
    raise ConfigError(
        f"{part!r} must be a name or name:setting=value, such as snapkv:window_size=32"
    )


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _numbers(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} must be whole numbers with commas between") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command, where errors meant for a user are one line."""
    try:
        return run(_parser().parse_args(arguments))
    except KeyholeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

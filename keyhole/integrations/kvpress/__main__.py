"""Asks a model tasks under kvpress's compressors; see docs/kvpress.md.

Names may have settings: `--presses snapkv:window_size=32,tova --tasks passkey:depth=0.5`. For the
bundled model a task in plain English stands for its form in that model's words. Every cell (task,
length, setup, press, budget) is a line that is added to --output; what is there already, with as
many samples, is not measured again. Exit status 1 if one was refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keyhole import method_settings
from keyhole.errors import ConfigError, KeyholeError
from keyhole.eval.line_file import LineFile
from keyhole.eval.settings import SETUPS
from keyhole.eval.tasks import answered, parse
from keyhole.integrations.kvpress.evaluation import PressCell, PressEvaluation
from keyhole.integrations.kvpress.presses import make_press, presses
from keyhole.method_settings import Spec
from keyhole.models.files.locate import TINY, is_tiny
from keyhole.models.loading import load


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m keyhole.integrations.kvpress",
        description="Tasks under kvpress's compressors, in the lines of `keyhole eval`.",
    )
    add = parser.add_argument
    add("model", nargs="?", default=TINY, help="folder, hub id, or tiny: the bundled model")
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
    """Measures what is not there yet, one line each here and in the file."""
    cells, file = list(_cells(arguments)), LineFile(arguments.output)
    evaluation = PressEvaluation(load(arguments.model, arguments.device, arguments.dtype))
    refused = 0
    for cell in cells:
        press, length = cell.press, cell.length
        name = f"{cell.task.name} {length} {cell.setup} {press.name} {press.budget}"
        stored = file.find(evaluation.known_by(cell), cell.samples)
        try:
            line = stored or evaluation.line(cell)
        except KeyholeError as error:
            print(f"{name}: refused: {error}", file=sys.stderr)
            refused += 1
            continue
        if stored is None:
            file.add(line)
        print(_told(name, line) + ("" if stored is None else ", there already"), flush=True)
    return 1 if refused else 0


def _told(name: str, line: Mapping[str, Any]) -> str:
    """A cell for people; without a decode step there is nothing to say of steps."""
    if not line["decode_steps"]:
        return f"{name}: score {line['score']:.3f}"
    return (
        f"{name}: score {line['score']:.3f}, {100 * line['read_share']:.1f} % of keys read, "
        f"{line['step_ms']:.1f} ms a step"
    )


def _cells(arguments: argparse.Namespace) -> Iterator[PressCell]:
    """All combinations; ConfigError for what cannot be understood."""
    made = [
        make_press(spec.name, budget, _settings(spec), arguments.interval)
        for spec in method_settings.parse(arguments.presses)
        for budget in _numbers(arguments.budgets, "--budgets")
    ]
    bundled = is_tiny(arguments.model)
    parsed = parse(arguments.tasks, bundled=bundled)
    tasks = answered(parsed, "forces a text; kvpress's presses only answer")
    lengths, setups = _numbers(arguments.lengths, "--lengths"), _words(arguments.setup)
    for task, length, setup, press in itertools.product(tasks, lengths, setups, made):
        yield PressCell(task=task, length=length, setup=setup, press=press, samples=arguments.limit)


def _settings(spec: Spec) -> dict[str, Any]:
    """In the types that they have in JSON: kvpress does not say what they may be."""
    try:
        return {name: json.loads(value) for name, value in spec.settings}
    except ValueError as error:
        raise ConfigError(
            f"settings in {spec.text!r} must be numbers, true or false, such as "
            "snapkv:window_size=32"
        ) from error


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

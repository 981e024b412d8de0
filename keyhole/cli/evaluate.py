"""Evaluates a model on tasks under several policies and budgets, next to full attention.

Names may have settings: `--tasks passkey:depth=0.5`, `--policies delta:recent_pages=2,quest`. For
the bundled model, tasks in plain English are replaced by their forms in its vocabulary. perplexity
and attention_recall force the text of --text through decode steps.

Every cell (task, length, setup, policy, budget) becomes a line of --output. Cells that are stored
with at least as many samples are not measured again: after an interruption, repeat the command.
Exit status 1 if a policy was refused on this model. docs/evaluation.md says what is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.cli import eval_suites
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.evaluation import (
    exit_status,
    header,
    methods_of,
    output_file,
    print_closing,
    print_table,
    resumable,
)
from keyhole.config import bytes_text, require_known
from keyhole.errors import ConfigError
from keyhole.eval import comparisons
from keyhole.eval.settings import FORCED, EvalSettings
from keyhole.policies import available_policies

if TYPE_CHECKING:
    from keyhole.eval.line_file import EvalOutcome


#: Name and one line of help.
SUITES = {
    "tasks": "tasks with right answers, and texts, under several policies and budgets",
    "attention": "how much of each layer's attention to a text every policy loses",
    "paper": "RULER, derivations and stored documents, with controls and a verdict for each method",
}
_DEFAULT = "tasks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole eval`: those of all suites."""
    flags.add_model(parser)
    suites = "; ".join(f"{name}: {about}" for name, about in SUITES.items())
    parser.add_argument(
        "--suite", metavar="NAME", default=_DEFAULT, help=f"what is measured: {suites}"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="keyhole-eval.jsonl",
        help="file of the results",
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page with pictures")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_task_arguments(parser)
    eval_suites.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the suite; returns its exit status."""
    require_known("suite", arguments.suite, SUITES)
    if arguments.suite != "paper":
        eval_suites.refuse(arguments, *eval_suites.PAPER_ONLY)
    runs = {
        "tasks": _run_tasks,
        "attention": eval_suites.run_attention,
        "paper": eval_suites.run_paper,
    }
    return runs[arguments.suite](arguments)


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    from keyhole.eval.tasks import names

    own = {"tasks": names(), "policies": ", ".join(available_policies())}
    rest = [field.name for field in dataclasses.fields(EvalSettings) if field.name not in own]
    flags.add_settings(parser, EvalSettings, "what is measured", rest)
    group = parser.add_argument_group("names, each optionally with settings")
    for name, known in own.items():
        text = f"{known}; default: {getattr(EvalSettings, name)}"
        group.add_argument(f"--{name}", metavar="NAME,NAME", help=text)


def _run_tasks(arguments: argparse.Namespace) -> int:
    """Measures the cells that are not stored yet and prints the table of all cells."""
    from keyhole.eval.tasks import answered, parse

    settings = EvalSettings(**flags.settings_of(arguments, EvalSettings))
    if settings.controls:
        comparisons.require_scipy()
    methods = methods_of(settings)
    file = output_file(arguments)
    bundled = flags.has_bundled_vocabulary(arguments.model)
    tasks = parse(settings.tasks, bundled=bundled)
    if settings.text is None and not bundled:
        answered(tasks, "needs your own text: --text FILE")
    if settings.text is not None and not any(isinstance(task, str) for task in tasks):
        raise ConfigError(
            f"--text is for the tasks {' and '.join(FORCED)}, but --tasks names neither"
        )
    model = flags.load_model(arguments)
    from keyhole.eval import suite

    with resumable(arguments.output):
        outcome = suite.evaluate(model, settings, tasks, methods, file, header("eval", model))
    if arguments.json:
        found: dict[str, Any] = {**vars(outcome), "output": arguments.output}
        if settings.controls:
            beside = comparisons.compared(outcome.lines)
            found["comparisons"] = [one and one.to_json() for one in beside]
        print(terminal.to_json(found))
    else:
        _print(outcome, settings, model.name, arguments.output)
    if arguments.html and outcome.lines:
        from keyhole.eval.report.page import write_report

        write_report(outcome.lines, Path(arguments.html))
    return exit_status(outcome)


def _print(outcome: EvalOutcome, settings: EvalSettings, model: str, output: str) -> None:
    if settings.controls:
        found = comparisons.controls_table(outcome.lines, outcome.refused)
    else:
        found = comparisons.results_table(outcome.lines, outcome.refused, bytes_text)
    terms = "" if settings.terms == "given" else f" ({settings.terms} terms)"
    print(f"{model}{terms}: {found.title}\n")
    print_table(found)
    if settings.terms == "tuned":
        print(f"\nchosen:\n{_chosen(outcome)}")
    print_closing(outcome, output)


def _chosen(outcome: EvalOutcome) -> str:
    """A line for the settings chosen for each method, length and budget."""
    texts = []
    for line in outcome.lines:
        if line.get("tuning"):
            chosen = [
                f"{name} {','.join(map(str, value)) if isinstance(value, list) else value}"
                for name, value in line["settings"].items()
                if value not in (None, [])
            ]
            texts.append(f"{line['method']} at {line['length']:,} tokens: {'; '.join(chosen)}")
    return "\n".join(dict.fromkeys(texts))

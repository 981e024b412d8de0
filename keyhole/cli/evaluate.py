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
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole import drawing, registry
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.terminal import LINES, PAGE, Output, check_outputs
from keyhole.config import bytes_text, require_known
from keyhole.errors import ConfigError
from keyhole.eval import comparisons
from keyhole.eval.line_file import EvalOutcome, EvalTable, LineFile
from keyhole.eval.settings import FORCED, EvalSettings
from keyhole.policies import available_policies, make_policy, policy_name
from keyhole.registry import is_settings_file

if TYPE_CHECKING:
    from keyhole.eval.methods import Method
    from keyhole.models.model import Model


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
    from keyhole.cli import eval_suites

    eval_suites.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the suite; returns its exit status."""
    require_known("suite", arguments.suite, SUITES)
    from keyhole.cli import eval_suites

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


def output_file(arguments: argparse.Namespace, *others: Output) -> LineFile:
    """The lines of --output; ConfigError, before hours of work, if a file cannot be written.

    others: more files that the command will write.
    """
    check_outputs(
        Output("--output", arguments.output, LINES), Output("--html", arguments.html, PAGE), *others
    )
    if arguments.html:
        drawing.matplotlib()
    return LineFile(arguments.output)


@contextmanager
def resumable(output: str) -> Iterator[None]:
    """Says after Ctrl-C that the same command resumes."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nstopped; the same command resumes from {output}", file=sys.stderr)
        raise


def header(benchmark: str, model: Model) -> Callable[[], dict[str, Any]]:
    """Returns a function that makes the fields of a line for how, where and when it was
    measured.
    """
    from keyhole.bench import measure

    return functools.partial(measure.header, benchmark, model.device)


def exit_status(outcome: EvalOutcome) -> int:
    """1 if a policy was refused, unless only because it cannot run at equal terms."""
    return 1 if any(not one.get("unequal") for one in outcome.refused) else 0


def methods_of(settings: EvalSettings) -> list[Method]:
    """Full attention, and every policy under every budget; a settings file has its own budget."""
    from keyhole.eval.methods import Budget, Method, under_budgets

    known, given = available_policies(), []
    for spec in registry.parse(settings.policies):
        name, stored = policy_name(spec.name), {}
        label = registry.written(name, spec.settings)
        if is_settings_file(name):
            policy = make_policy(name)
            name, stored = policy.name, dataclasses.asdict(policy)
        require_known("policy", name, known)
        own = registry.Spec(name, spec.settings)
        typed = registry.typed(own, "policy", dataclasses.fields(known[name]))
        given.append(Method(label=label, name=name, settings={**stored, **typed}))
    return under_budgets(given, [Budget.parse(text) for text in settings.budgets])


def print_table(table: EvalTable) -> None:
    """Prints a table without its title."""
    print(terminal.table(table.heads, table.rows, left=table.left))


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


def print_closing(outcome: EvalOutcome, output: str) -> None:
    """Prints how many cells were measured, and what was refused."""
    new = len(outcome.lines) - outcome.stored
    print(f"\n{terminal.count(new, 'cell')} measured, {outcome.stored} stored before: {output}")
    reasons = [
        f"{comparisons.NOT_EQUAL if one.get('unequal') else 'refused'}: {one['method']}: "
        f"{one['error']}"
        for one in outcome.refused
    ]
    # Each once: a budget that is too small is refused for every task.
    print("\n".join(dict.fromkeys(reasons)), end="\n" if reasons else "")

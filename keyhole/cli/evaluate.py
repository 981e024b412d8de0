"""Asks a model tasks under several policies and budgets, beside full attention.

Names may have settings: `--tasks passkey:depth=0.5`, `--policies delta:recent_pages=2,quest`. For
the bundled model, tasks in plain English are replaced by their forms in its words. perplexity and
attention_recall force the text of --text through decode steps.

Every cell (task, length, setup, policy, budget) becomes a line of --output. Cells that are stored
with as many samples are not measured again: after an interruption, repeat the command.
Exit status 1 if a policy was refused on this model. docs/evaluation.md says what is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keyhole
from keyhole import drawing, registry
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.terminal import LINES, PAGE, Output, check_outputs
from keyhole.errors import UnknownNameError
from keyhole.eval.line_file import EvalOutcome, LineFile
from keyhole.eval.settings import EvalSettings
from keyhole.policies import available_policies, make_policy, policy_name
from keyhole.registry import is_settings_file

if TYPE_CHECKING:
    from keyhole.eval.methods import Method


#: Name and one line of help.
SUITES = {
    "tasks": "tasks with right answers, and texts, under several policies and budgets",
    "attention": "what each layer loses of a text's attention under every policy",
    "paper": "RULER, derivations and stored documents, with controls and a verdict for each method",
}
_DEFAULT = "tasks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole eval`: those of all suites."""
    flags.add_model(parser)
    told = "; ".join(f"{name}: {about}" for name, about in SUITES.items())
    parser.add_argument(
        "--suite", metavar="NAME", default=_DEFAULT, help=f"what is measured: {told}"
    )
    parser.add_argument(
        "--output", metavar="FILE", default="keyhole-eval.jsonl", help="where the lines are kept"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_task_arguments(parser)
    from keyhole.cli import eval_suites

    eval_suites.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the suite; returns its exit status."""
    if arguments.suite not in SUITES:
        raise UnknownNameError("suite", arguments.suite, SUITES)
    from keyhole.cli import eval_suites

    runs = {
        "tasks": _run_tasks,
        "attention": eval_suites.run_attention,
        "paper": eval_suites.run_paper,
    }
    return runs[arguments.suite](arguments)


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the suite."""
    from keyhole.eval.tasks import names

    own = {"tasks": names(), "policies": ", ".join(available_policies())}
    rest = [field.name for field in dataclasses.fields(EvalSettings) if field.name not in own]
    flags.add_settings(parser, EvalSettings, "what is measured", rest)
    group = parser.add_argument_group("names, and settings behind them")
    for name, known in own.items():
        text = f"{known}; default: {getattr(EvalSettings, name)}"
        group.add_argument(f"--{name}", metavar="NAME,NAME", help=text)


def _run_tasks(arguments: argparse.Namespace) -> int:
    """Measures what is not there yet and prints the table of all that was asked for."""
    from keyhole.eval.tasks import answered, parse

    settings = EvalSettings(**flags.settings_of(arguments, EvalSettings))
    if settings.controls:  # before hours of work
        require_statistics()
    methods = methods_of(settings)
    check_outputs(
        Output("--output", arguments.output, LINES),
        Output("--html", arguments.html, PAGE),
    )
    file = LineFile(arguments.output)
    bundled = flags.is_bundled(arguments.model)
    tasks = parse(settings.tasks, bundled=bundled)
    if settings.text is None and not bundled:
        answered(tasks, "needs a text of your own: --text FILE")
    if arguments.html:  # before hours of work
        drawing.matplotlib()
    model = flags.load_model(arguments)
    from keyhole.bench import measure
    from keyhole.eval import suite

    def header() -> dict[str, Any]:
        return measure.header("eval", model.device, "", keyhole.__version__)

    try:
        outcome = suite.evaluate(model, settings, tasks, methods, file, header)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from {arguments.output}", file=sys.stderr)
        raise
    if arguments.json:
        print(terminal.to_json(_told(outcome, settings, arguments.output)))
    else:
        _print(outcome, settings, model.name, arguments.output)
    if arguments.html and outcome.lines:
        from keyhole.eval.report.page import write_report

        write_report(outcome.lines, Path(arguments.html))
    return 1 if any(not one.get("unequal") for one in outcome.refused) else 0


def methods_of(settings: EvalSettings) -> list[Method]:
    """Full attention, and every policy under every budget; one of a settings file has its own."""
    from keyhole.eval.methods import Budget, Method, under_budgets

    known, given = available_policies(), []
    for spec in registry.parse(settings.policies):
        name, stored = policy_name(spec.name), {}
        label = registry.written(name, spec.settings)
        if is_settings_file(name):
            policy = make_policy(name)
            name, stored = policy.name, dataclasses.asdict(policy)
        if name not in known:
            raise UnknownNameError("policy", name, known)
        own = registry.Spec(name, spec.settings)
        typed = registry.typed(own, "policy", dataclasses.fields(known[name]))
        given.append(Method(label=label, name=name, settings={**stored, **typed}))
    return under_budgets(given, [Budget.parse(text) for text in settings.budgets])


def _told(outcome: EvalOutcome, settings: EvalSettings, output: str) -> dict[str, Any]:
    """For `--json`: lines, and what they say beside their controls."""
    told: dict[str, Any] = {**vars(outcome), "output": output}
    if settings.controls:
        from keyhole.eval.comparisons import compared

        told["comparisons"] = [one and one.to_json() for one in compared(outcome.lines)]
    return told


def _print(outcome: EvalOutcome, settings: EvalSettings, model: str, output: str) -> None:
    from keyhole.eval import comparisons

    if settings.controls:
        found = comparisons.controls_table(outcome.lines, outcome.refused)
    else:
        found = comparisons.results_table(outcome.lines, outcome.refused, terminal.bytes_text)
    terms = "" if settings.terms == "given" else f" ({settings.terms} terms)"
    print(f"{model}{terms}: {found.title}\n")
    print(terminal.table(found.heads, found.rows, left=found.left))
    if settings.terms == "tuned":
        print(f"\nchosen:\n{_chosen(outcome)}")
    print(_closing(outcome, output))


def _chosen(outcome: EvalOutcome) -> str:
    """What was chosen for each method, length and budget: a line each."""
    texts = []
    for line in outcome.lines:
        if line.get("tuning"):
            told = [
                f"{name} {','.join(map(str, value)) if isinstance(value, list) else value}"
                for name, value in line["settings"].items()
                if value not in (None, [])
            ]
            texts.append(f"{line['method']} at {line['length']:,} tokens: {'; '.join(told)}")
    return "\n".join(dict.fromkeys(texts))


def require_statistics() -> None:
    """ConfigError if the tests of --controls cannot be computed."""
    from keyhole.eval import comparisons

    comparisons.require_scipy()


def _closing(outcome: EvalOutcome, output: str) -> str:
    """How many lines there are now, and what was refused."""
    new = len(outcome.lines) - outcome.stored
    parts = [f"\n{terminal.count(new, 'cell')} measured, {outcome.stored} there already: {output}"]
    # Once each: a budget that is too small is so for every task.
    from keyhole.eval.comparisons import NOT_EQUAL

    reasons = [
        f"{NOT_EQUAL if one.get('unequal') else 'refused'}: {one['method']}: {one['error']}"
        for one in outcome.refused
    ]
    return "\n".join([*parts, *dict.fromkeys(reasons)])

"""The suite `tasks` of `keyhole eval`: samples with a score each, task by task.

Names may have settings: `--tasks passkey:depth=0.5`, `--policies delta:recent_pages=2,quest`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keyhole
from keyhole import drawing, registry
from keyhole.cli.common import flags, outputs, show
from keyhole.cli.common.outputs import Output
from keyhole.errors import UnknownNameError
from keyhole.eval.results.line_file import LineFile
from keyhole.eval.settings import EvalSettings
from keyhole.policies import available_policies, make_policy, policy_name
from keyhole.registry import is_settings_file

if TYPE_CHECKING:
    from keyhole.eval.methods import Method
    from keyhole.eval.run import EvalOutcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the suite."""
    from keyhole.eval import task_specs

    own = {"tasks": task_specs.names(), "policies": ", ".join(available_policies())}
    rest = [field.name for field in dataclasses.fields(EvalSettings) if field.name not in own]
    flags.add_settings(parser, EvalSettings, "what is measured", rest)
    group = parser.add_argument_group("names, and settings behind them")
    for name, known in own.items():
        text = f"{known}; default: {getattr(EvalSettings, name)}"
        group.add_argument(f"--{name}", metavar="NAME,NAME", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Measures what is not there yet and prints the table of all that was asked for."""
    from keyhole.eval import task_specs

    settings = EvalSettings(**flags.settings_of(arguments, EvalSettings))
    if settings.controls:  # before hours of work
        require_statistics()
    methods = methods_of(settings)
    outputs.check(
        Output("--output", arguments.output, outputs.LINES),
        Output("--html", arguments.html, outputs.PAGE),
    )
    file = LineFile(arguments.output)
    bundled = flags.is_bundled(arguments.model)
    tasks = task_specs.parse(settings.tasks, bundled=bundled)
    if settings.text is None and not bundled:
        task_specs.answered(tasks, "needs a text of your own: --text FILE")
    page: Any = None
    if arguments.html:
        page = importlib.import_module("keyhole.eval.report.page")
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
        print(show.to_json(_told(outcome, settings, arguments.output)))
    else:
        _print(outcome, settings, model.name, arguments.output)
    if arguments.html and outcome.lines:
        page.write_report(outcome.lines, Path(arguments.html))
    return 1 if any(not one.get("unequal") for one in outcome.refused) else 0


def methods_of(settings: EvalSettings) -> list[Method]:
    """Full attention, and every policy under every budget; one of a settings file has its own."""
    from keyhole.eval.methods import Budget, Method, methods

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
    return methods(given, [Budget.parse(text) for text in settings.budgets])


def _told(outcome: EvalOutcome, settings: EvalSettings, output: str) -> dict[str, Any]:
    """For `--json`: lines, and what they say beside their controls."""
    told: dict[str, Any] = {**vars(outcome), "output": output}
    if settings.controls:
        from keyhole.eval.results.comparisons import compared

        told["comparisons"] = [one and one.to_json() for one in compared(outcome.lines)]
    return told


def _print(outcome: EvalOutcome, settings: EvalSettings, model: str, output: str) -> None:
    from keyhole.eval.results import table
    from keyhole.eval.terms import controls_table

    if settings.controls:
        found = controls_table.table(outcome.lines, outcome.refused)
    else:
        found = table.table(outcome.lines, outcome.refused, show.bytes_text)
    terms = "" if settings.terms == "given" else f" ({settings.terms} terms)"
    print(f"{model}{terms}: {found.common}\n")
    print(show.table(found.heads, found.rows, left=found.left))
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
    from keyhole.eval.results import paired

    paired.require_scipy()


def _closing(outcome: EvalOutcome, output: str) -> str:
    """How many lines there are now, and what was refused."""
    new = len(outcome.lines) - outcome.stored
    parts = [f"\n{show.count(new, 'cell')} measured, {outcome.stored} there already: {output}"]
    # Once each: a budget that is too small is so for every task.
    from keyhole.eval.results.table import NOT_EQUAL

    reasons = [
        f"{NOT_EQUAL if one.get('unequal') else 'refused'}: {one['method']}: {one['error']}"
        for one in outcome.refused
    ]
    return "\n".join([*parts, *dict.fromkeys(reasons)])

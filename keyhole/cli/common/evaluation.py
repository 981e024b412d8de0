"""What the suites of `keyhole eval` share: methods, files, and what is printed around a table."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from keyhole import drawing, registry
from keyhole.cli.common import terminal
from keyhole.cli.common.terminal import LINES, PAGE, Output, check_outputs
from keyhole.config import require_known
from keyhole.eval import comparisons
from keyhole.eval.line_file import EvalOutcome, EvalTable, LineFile
from keyhole.policies import available_policies, make_policy, policy_name
from keyhole.registry import is_settings_file

if TYPE_CHECKING:
    from keyhole.eval.methods import Method
    from keyhole.eval.settings import EvalSettings
    from keyhole.models.model import Model


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

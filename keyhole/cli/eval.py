"""Asks a model tasks under several policies and budgets, beside full attention.

Names may have settings: `--tasks passkey:depth=0.5`, `--policies delta:recent_pages=2,quest`. For
the bundled model, tasks in plain English stand for their forms in its own words. perplexity and
attention_recall force the text of --text through decode steps.

Every cell (task, length, setup, policy, budget) becomes a line of --output. What is there already,
with as many samples, is not measured again, so that after an interruption the same command goes on.
Exit status 1 if a policy was refused on this model. docs/evaluation.md says what is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keyhole
from keyhole import drawing
from keyhole.cli import flags, show
from keyhole.config import EngineConfig
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.evaluate import specs
from keyhole.evaluate.eval_settings import EvalSettings
from keyhole.evaluate.line_file import LineFile
from keyhole.policy import policies

if TYPE_CHECKING:
    from keyhole.evaluate.eval_methods import Method
    from keyhole.evaluate.eval_run import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole eval`."""
    from keyhole.evaluate import task_specs

    flags.add_model(parser, positional=True)
    parser.add_argument(
        "--output", metavar="FILE", default="keyhole-eval.jsonl", help="where the lines are kept"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    own = {"tasks": task_specs.names(), "policies": ", ".join(policies())}
    rest = [field.name for field in dataclasses.fields(EvalSettings) if field.name not in own]
    flags.add_settings(parser, EvalSettings, "what is measured", rest)
    group = parser.add_argument_group("names, and settings behind them")
    for name, known in own.items():
        text = f"{known}; default: {getattr(EvalSettings, name)}"
        group.add_argument(f"--{name}", metavar="NAME,NAME", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Measures what is not there yet and prints the table of all that was asked for."""
    from keyhole.evaluate import task_specs

    settings = EvalSettings(**flags.settings_of(arguments, EvalSettings))
    methods, file = _methods(settings), LineFile(arguments.output)
    bundled = _is_bundled(arguments.model)
    tasks = task_specs.parse(settings.tasks, bundled=bundled)
    if settings.text is None and not bundled:
        task_specs.answered(tasks, "needs a text of your own: --text FILE")
    if arguments.html:  # before hours of work
        page = importlib.import_module("keyhole.evaluate.report_page")
        drawing.matplotlib()
        folder = Path(arguments.html).parent
        if not folder.is_dir():
            raise ConfigError(f"--html {arguments.html!r}: there is no folder {str(folder)!r}")
    model = flags.load_model(arguments)
    import torch

    from keyhole.bench import measure
    from keyhole.engine.allocation import free_memory
    from keyhole.engine.prompt_copies import PromptCopies
    from keyhole.evaluate import eval_table, eval_workloads
    from keyhole.evaluate.eval_run import Evaluation, Grid

    def header() -> dict[str, Any]:
        return measure.header("eval", model.device, "", keyhole.__version__)

    grid = Grid(
        workloads=eval_workloads.workloads(tasks, settings.text, model),
        lengths=settings.lengths,
        setups=tuple(dict.fromkeys(settings.setup)),
        methods=methods,
        samples=settings.limit,
        maps=settings.maps,
        # Prompts that are gone must not count as memory in use.
        config=EngineConfig(max_batch=settings.batch, prefix_cache=False),
    )
    try:
        limit = settings.prompt_memory or free_memory(torch.device("cpu")) // 4
        outcome = Evaluation(model, grid, file, header, PromptCopies(limit)).run()
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from {arguments.output}", file=sys.stderr)
        raise
    if arguments.json:
        print(show.to_json({**vars(outcome), "output": arguments.output}))
    else:
        found = eval_table.table(outcome.lines, outcome.refused, show.bytes_text)
        print(f"{model.name}: {found.common}\n")
        print(show.table(found.heads, found.rows, left=found.left))
        print(_closing(outcome, arguments.output))
    if arguments.html and outcome.lines:
        page.write_report(outcome.lines, Path(arguments.html))
    return 1 if outcome.refused else 0


def _methods(settings: EvalSettings) -> list[Method]:
    """Full attention, and every policy under every budget."""
    from keyhole.evaluate.eval_methods import Budget, Method, methods

    known, given = policies(), []
    for spec in specs.parse(settings.policies):
        if spec.name not in known:
            raise UnknownNameError("policy", spec.name, known)
        fields = dataclasses.fields(known[spec.name])
        typed = specs.typed(spec, "policy", fields)
        given.append(Method(label=spec.text, name=spec.name, settings=typed))
    return methods(given, [Budget.parse(text) for text in settings.budgets])


def _is_bundled(model: str | None) -> bool:
    return model is None or Path(model).resolve() == Path(keyhole.tiny()).resolve()


def _closing(outcome: Outcome, output: str) -> str:
    """How many lines there are now, and what was refused."""
    new = len(outcome.lines) - outcome.stored
    parts = [f"\n{show.count(new, 'cell')} measured, {outcome.stored} there already: {output}"]
    # Once each: a budget that is too small is so for every task.
    reasons = [f"refused: {one['method']}: {one['error']}" for one in outcome.refused]
    return "\n".join([*parts, *dict.fromkeys(reasons)])

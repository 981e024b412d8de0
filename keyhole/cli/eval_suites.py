"""The suites `attention` and `paper` of `keyhole eval`.

attention: what sparse attention loses of a text, layer by layer. It takes --text (several files
with commas between), --lengths, --limit, --policies (all of them, unless some are named), --budgets
(1/8,1/16), --terms and its settings, --batch, --prompt-memory. docs/attention.md says what is
measured.

paper: whether a method may be used on a checkpoint, and how. First `keyhole verify`: a model that
fails is not evaluated. Then an estimate of the time; RULER and long derivations under every policy
with its controls; questions over stored documents under every reuse method. At the end a verdict
for each, a page, and a settings file for `LLM(policy=FILE)`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keyhole
from keyhole import drawing
from keyhole.cli import evaluate
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.terminal import LINES, PAGE, POLICY, Output, check_outputs
from keyhole.cli.evaluate import methods_of
from keyhole.config import EngineConfig, require
from keyhole.errors import ConfigError
from keyhole.eval import comparisons
from keyhole.eval.line_file import EvalOutcome, LineFile
from keyhole.eval.settings import TAKEN, AttentionSettings, EvalSettings
from keyhole.policies import available_policies

if TYPE_CHECKING:
    from keyhole.eval.forced_text import Windows
    from keyhole.eval.paper.suite import PaperSuite
    from keyhole.eval.tasks import Task
    from keyhole.models.loading import Model


def run_attention(arguments: argparse.Namespace) -> int:
    """Measures what is not there yet and prints the tables of all that was asked for."""
    given = flags.settings_of(arguments, AttentionSettings)
    for name in given:
        if name not in TAKEN:
            raise ConfigError(f"--{name.replace('_', '-')} is not for --suite attention")
    settings = AttentionSettings(**given)
    names = settings.policies or ",".join(
        name for name, cls in available_policies().items() if not cls.dense
    )
    methods = [
        method
        for method in methods_of(dataclasses.replace(settings, policies=names))
        if not available_policies()[method.name].dense
    ]
    check_outputs(
        Output("--output", arguments.output, LINES),
        Output("--html", arguments.html, PAGE),
    )
    flags.find_model(arguments)  # before scipy and matplotlib are imported
    comparisons.require_scipy()  # of the intervals; before hours of work
    file = LineFile(arguments.output)
    if arguments.html:  # before hours of work
        drawing.matplotlib()
    model = flags.load_model(arguments)
    import torch

    from keyhole.bench import measure
    from keyhole.engine.allocation import free_memory
    from keyhole.engine.shared_prompt_cache import SharedPromptCache
    from keyhole.eval.attention.suite import AttentionGrid, AttentionSuite
    from keyhole.eval.methods import Budget
    from keyhole.eval.suite import terms_of

    def header() -> dict[str, Any]:
        return measure.header("attention", model.device, "", keyhole.__version__)

    grid = AttentionGrid(
        windows=_windows(model, settings, flags.is_bundled(arguments.model)),
        lengths=settings.lengths,
        methods=methods,
        budgets=[Budget.parse(text) for text in settings.budgets],
        texts=settings.limit,
        terms=terms_of(settings),
        # Prompts that are gone must not count as memory in use.
        config=EngineConfig(max_batch=settings.batch, prefix_cache=False),
    )
    try:
        limit = settings.prompt_memory or free_memory(torch.device("cpu")) // 4
        outcome = AttentionSuite(model, grid, file, header, SharedPromptCache(limit)).run()
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from {arguments.output}", file=sys.stderr)
        raise
    if arguments.json:
        print(terminal.to_json({**vars(outcome), "output": arguments.output}))
    else:
        _print_attention(model, outcome, arguments.output)
    if arguments.html and outcome.lines:
        from keyhole.eval.attention.pictures import write_page

        write_page(outcome.lines, Path(arguments.html))
    return 1 if any(not one["unequal"] for one in outcome.refused) else 0


def _windows(model: Model, settings: AttentionSettings, bundled: bool) -> Windows:
    from keyhole.eval import forced_text
    from keyhole.eval.forced_text import TinyText

    if settings.files:
        return forced_text.Texts(settings.files, model)
    return TinyText(model) if bundled else forced_text.library(model)


def _print_attention(model: Model, outcome: EvalOutcome, output: str) -> None:
    from keyhole.eval.attention import tables

    print(f"{model.name}")
    for place in tables.places(outcome.lines):
        print(f"\n{tables.title(place)}")
        for one in tables.tables(place):
            print(f"\n{one.title}")
            print(terminal.table(one.heads, one.rows, left=one.left))
    print(f"\n{tables.HOW_TO_READ}")
    new = len(outcome.lines) - outcome.stored
    print(f"\n{terminal.count(new, 'cell')} measured, {outcome.stored} there already: {output}")
    for reason in dict.fromkeys(f"refused: {x['method']}: {x['error']}" for x in outcome.refused):
        print(reason)


#: What the suite asks where the flags do not say it. Lengths and policies depend on the model.
_DEFAULTS: dict[str, Any] = {
    "tasks": "ruler,walk,derive",
    "limit": 50,
    "setup": ("question",),
    "budgets": ("1/16", "1/8", "1/4"),
}
_DOCUMENTS = "multi_document_1,multi_document_2"
#: Of the bundled model's own kinds the one where a document says little without the others.
_BUNDLED_DOCUMENTS = f"{_DOCUMENTS},tiny_documents_needs_each_other"
_SETTINGS = "keyhole-settings.json"
#: Columns of a text in the help that argparse leaves as it is.
_WIDTH = 76


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the suite that the others do not have."""
    usual = " ".join(f"--{name} {_written(value)}" for name, value in _DEFAULTS.items())
    about = f"Unless said otherwise: {usual}, and the lengths and policies that the model can have."
    group = parser.add_argument_group("suite paper", textwrap.fill(about, _WIDTH))
    group.add_argument(
        "--settings",
        metavar="FILE",
        default=_SETTINGS,
        help="where the settings to use are written, for LLM(policy=FILE)",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="say what would be measured and how long it takes"
    )


def _written(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def run_paper(arguments: argparse.Namespace) -> int:
    """Gate, estimate, measurements, verdicts."""
    given = flags.settings_of(arguments, EvalSettings)
    html = Path(arguments.html or Path(arguments.output).with_suffix(".html"))
    check_outputs(
        Output("--output", arguments.output, LINES),
        Output("--html", html, PAGE),
        Output("--settings", arguments.settings, POLICY),
    )
    file = LineFile(arguments.output)
    flags.find_model(arguments)  # before scipy and matplotlib are imported
    evaluate.require_statistics()
    drawing.matplotlib()
    model = flags.load_model(arguments)
    from keyhole.bench import measure
    from keyhole.eval.paper import report
    from keyhole.eval.paper.suite import estimate_text, gate, why_not_evaluated
    from keyhole.eval.run import model_digest

    def header() -> dict[str, Any]:
        return measure.header("eval", model.device, "", keyhole.__version__)

    suite = _paper_suite(model, given, file, header, flags.is_bundled(arguments.model))
    told = sys.stderr if arguments.json else sys.stdout
    if arguments.dry_run:
        parts = suite.estimate()
        print(f"{model.name}, {estimate_text(parts)}", file=told)
        if arguments.json:
            print(terminal.to_json([vars(part) for part in parts]))
        return 0
    try:
        checked = gate(model, file, header)
        wrong = why_not_evaluated(checked)
        if wrong is not None:
            print(f"not evaluated: {wrong}", file=sys.stderr)
            return 1
        print(f"verify: {terminal.count(len(checked['checks']), 'check')} passed", file=told)
        print(f"{model.name}, {estimate_text(suite.estimate())}\n", file=told, flush=True)
        outcome = suite.run()
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from {arguments.output}", file=sys.stderr)
        raise
    about = {"model": model.name, "fingerprint": model_digest(model)} | header()
    geometry = model.geometry(EngineConfig.page_size)
    settings = report.recommended(outcome, about, geometry.num_layers)
    settings.save(arguments.settings)
    report.write_page(outcome, settings, html)
    if arguments.json:
        lines = {"lines": outcome.cells.lines, "questions": outcome.questions.lines}
        refused = [*outcome.cells.refused, *outcome.questions.refused]
        print(terminal.to_json(lines | {"refused": refused} | dataclasses.asdict(settings)))
    else:
        for table in report.tables(outcome):
            print(f"{table.title}\n")
            print(terminal.table(table.heads, table.rows, left=table.left) + "\n")
        print(f"settings to use: {arguments.settings}; page: {html}; lines: {arguments.output}")
    refused = [one for one in outcome.cells.refused if not one["unequal"]]
    return 1 if refused or outcome.questions.refused else 0


def _paper_suite(
    model: Model, given: dict[str, Any], file: LineFile, header: Any, bundled: bool
) -> PaperSuite:
    import torch

    from keyhole.engine.allocation import free_memory
    from keyhole.engine.shared_prompt_cache import SharedPromptCache
    from keyhole.eval.paper.documents import DocumentGrid
    from keyhole.eval.paper.suite import (
        PaperGrid,
        PaperSuite,
        default_lengths,
        default_policies,
        document_places,
        fitting_lengths,
    )
    from keyhole.eval.suite import make_workloads, terms_of
    from keyhole.eval.tasks import answered, parse

    own = {"lengths": default_lengths(model), "policies": default_policies(model)}
    settings = EvalSettings(**(_DEFAULTS | own | given))
    good = settings.terms != "tuned"
    right = "given, equal or published here; what --suite tasks has tuned goes into --policies"
    require(good, "terms", settings.terms, right)
    tasks: list[Task | str] = list(
        answered(parse(settings.tasks, bundled=bundled), "is over a text: not in this suite")
    )
    asked = parse(_BUNDLED_DOCUMENTS if bundled else _DOCUMENTS, bundled=bundled)
    workloads = make_workloads(tasks, None, model, settings.first_seed)
    setups = tuple(dict.fromkeys(settings.setup))
    lengths_of = fitting_lengths(workloads, settings.lengths, setups[0])
    grid = PaperGrid(
        workloads=workloads,
        lengths=settings.lengths,
        lengths_of=lengths_of,
        setups=setups,
        methods=evaluate.methods_of(settings),
        samples=settings.limit,
        maps=settings.maps,
        terms=terms_of(settings),
        controls=True,
        config=EngineConfig(max_batch=settings.batch, prefix_cache=False),
    )
    documents = DocumentGrid(
        places=document_places(
            answered(asked, "is no question over documents"), settings.lengths, model
        ),
        samples=settings.limit,
        first_seed=settings.first_seed,
    )
    limit = settings.prompt_memory or free_memory(torch.device("cpu")) // 4
    return PaperSuite(model, grid, documents, file, header, SharedPromptCache(limit))

"""The suites `attention` and `paper` of `keyhole eval`.

attention: how much of the attention to a text is lost, layer by layer. It takes --text (several
files, separated by commas), --lengths, --limit, --policies (default: all), --budgets (default:
1/8,1/16), --terms and its settings, --batch, --prompt-memory. docs/attention.md says what is
measured.

paper: whether a method may be used on a checkpoint, and how. First it runs `keyhole verify`; a
model that fails is not evaluated. Then it estimates the time, and evaluates RULER and long
derivations under every policy and its controls, and questions over stored documents under every
reuse method. It ends with a verdict for each method, a page, and a settings file for
`LLM(policy=FILE)`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from keyhole.cli.common.terminal import POLICY, Output
from keyhole.config import EngineConfig, require
from keyhole.errors import ConfigError
from keyhole.eval import comparisons
from keyhole.eval.line_file import EvalOutcome, LineFile
from keyhole.eval.settings import TAKEN, AttentionSettings, EvalSettings
from keyhole.policies import available_policies

if TYPE_CHECKING:
    from keyhole.eval.forced_text import Windows
    from keyhole.eval.paper.suite import PaperSuite
    from keyhole.eval.suite import Header
    from keyhole.eval.tasks import Task
    from keyhole.models.model import Model


#: Flags that only the suite `paper` takes, and those that it does not take.
PAPER_ONLY = ("settings", "dry_run")
_NOT_PAPER = ("text", "prefill_policies")


def refuse(arguments: argparse.Namespace, *names: str) -> None:
    """ConfigError if one of these flags was given, which the suite would ignore."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value is not False:  # 0 is a value
            flag = flags.flag_of(name)
            raise ConfigError(f"{flag} cannot be used with --suite {arguments.suite}")


def run_attention(arguments: argparse.Namespace) -> int:
    """Measures the cells that are not stored yet and prints the tables of all cells."""
    given = flags.settings_of(arguments, AttentionSettings)
    refuse(arguments, *(name for name in given if name not in TAKEN))
    settings = AttentionSettings(**given)
    names = settings.policies or ",".join(
        name for name, cls in available_policies().items() if not cls.dense
    )
    methods = [
        method
        for method in methods_of(dataclasses.replace(settings, policies=names))
        if not available_policies()[method.name].dense
    ]
    require(bool(methods), "policies", names, "at least one that selects, such as quest")
    flags.find_model(arguments)  # before scipy and matplotlib are imported
    comparisons.require_scipy()
    file = output_file(arguments)
    model = flags.load_model(arguments)
    from keyhole.eval.attention.suite import AttentionGrid, AttentionSuite
    from keyhole.eval.methods import Budget
    from keyhole.eval.suite import shared_prompts, terms_of

    grid = AttentionGrid(
        windows=_windows(model, settings, flags.has_bundled_vocabulary(arguments.model)),
        lengths=settings.lengths,
        methods=methods,
        budgets=[Budget.parse(text) for text in settings.budgets],
        texts=settings.limit,
        terms=terms_of(settings),
        # Prompts that are no longer needed must not count as memory in use.
        config=EngineConfig(max_batch=settings.batch, prefix_cache=False),
    )
    copies = shared_prompts(settings)
    with resumable(arguments.output):
        outcome = AttentionSuite(model, grid, file, header("attention", model), copies).run()
    if arguments.json:
        print(terminal.to_json({**vars(outcome), "output": arguments.output}))
    else:
        _print_attention(model, outcome, arguments.output)
    if arguments.html and outcome.lines:
        from keyhole.eval.attention.pictures import write_page

        write_page(outcome.lines, Path(arguments.html))
    return exit_status(outcome)


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
            print_table(one)
    print(f"\n{tables.HOW_TO_READ}")
    print_closing(outcome, output)


#: Defaults of the suite. Those of lengths and policies depend on the model.
_DEFAULTS: dict[str, Any] = {
    "tasks": "ruler,walk,derive",
    "limit": 50,
    "setup": ("question",),
    "budgets": ("1/16", "1/8", "1/4"),
}
_DOCUMENTS = "multi_document_1,multi_document_2"
#: Adds the bundled model's questions whose documents refer to each other.
_BUNDLED_DOCUMENTS = f"{_DOCUMENTS},tiny_documents_needs_each_other"
_SETTINGS = "keyhole-settings.json"
#: Width of the paragraph in the help that argparse does not wrap.
_WIDTH = 76


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that only the suite `paper` has."""
    usual = " ".join(f"--{name} {terminal.setting(value)}" for name, value in _DEFAULTS.items())
    about = f"Defaults: {usual}, and the lengths and policies that suit the model."
    group = parser.add_argument_group("suite paper", textwrap.fill(about, _WIDTH))
    group.add_argument(
        "--settings",
        metavar="FILE",
        help="file to write the recommended settings to, for LLM(policy=FILE); default: "
        f"{_SETTINGS}",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be measured, and an estimate of the time",
    )


def run_paper(arguments: argparse.Namespace) -> int:
    """Runs the gate, estimates the time, measures, and prints the verdicts."""
    refuse(arguments, *_NOT_PAPER)
    given = flags.settings_of(arguments, EvalSettings)
    arguments.settings = arguments.settings or _SETTINGS
    arguments.html = arguments.html or str(Path(arguments.output).with_suffix(".html"))
    flags.find_model(arguments)  # before scipy and matplotlib are imported
    comparisons.require_scipy()
    file = output_file(arguments, Output("--settings", arguments.settings, POLICY))
    model = flags.load_model(arguments)
    from keyhole.eval.paper import report
    from keyhole.eval.paper.suite import estimate_text, gate, why_not_evaluated
    from keyhole.eval.run import model_digest

    about = header("eval", model)
    suite = _paper_suite(model, given, file, about, flags.has_bundled_vocabulary(arguments.model))
    stream = sys.stderr if arguments.json else sys.stdout
    if arguments.dry_run:
        parts = suite.estimate()
        print(f"{model.name}, {estimate_text(parts)}", file=stream)
        if arguments.json:
            print(terminal.to_json([vars(part) for part in parts]))
        return 0
    with resumable(arguments.output):
        checked = gate(model, file, about)
        wrong = why_not_evaluated(checked)
        if wrong is not None:
            print(f"not evaluated: {wrong}", file=sys.stderr)
            return 1
        print(f"verify: {terminal.count(len(checked['checks']), 'check')} passed", file=stream)
        print(f"{model.name}, {estimate_text(suite.estimate())}\n", file=stream, flush=True)
        outcome = suite.run()
    measured = {"model": model.name, "fingerprint": model_digest(model)} | about()
    geometry = model.geometry(EngineConfig.page_size)
    settings = report.recommended(outcome, measured, geometry.num_layers)
    settings.save(arguments.settings)
    report.write_page(outcome, settings, arguments.html)
    if arguments.json:
        lines = {"lines": outcome.cells.lines, "questions": outcome.questions.lines}
        refused = [*outcome.cells.refused, *outcome.questions.refused]
        print(terminal.to_json(lines | {"refused": refused} | dataclasses.asdict(settings)))
    else:
        for table in report.tables(outcome):
            print(f"{table.title}\n")
            print_table(table)
            print()
        print(
            f"recommended settings: {arguments.settings}; page: {arguments.html}; "
            f"lines: {arguments.output}"
        )
    return 1 if outcome.questions.refused else exit_status(outcome.cells)


def _paper_suite(
    model: Model, given: dict[str, Any], file: LineFile, about: Header, bundled: bool
) -> PaperSuite:
    from keyhole.eval.paper.documents import DocumentGrid
    from keyhole.eval.paper.suite import (
        PaperGrid,
        PaperSuite,
        default_lengths,
        default_policies,
        document_places,
        fitting_lengths,
    )
    from keyhole.eval.suite import make_workloads, shared_prompts, terms_of
    from keyhole.eval.tasks import answered, parse

    own = {"lengths": default_lengths(model), "policies": default_policies(model)}
    settings = EvalSettings(**(_DEFAULTS | own | given))
    good = settings.terms != "tuned"
    right = "given, equal or published; put settings tuned by --suite tasks into --policies"
    require(good, "terms", settings.terms, right)
    right = "auto: this suite compares methods over unquantised keys; use --suite tasks"
    require(settings.kv_dtype == "auto", "kv_dtype", settings.kv_dtype, right)
    tasks: list[Task | str] = list(
        answered(
            parse(settings.tasks, bundled=bundled),
            "uses teacher forcing, which this suite does not support",
        )
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
        methods=methods_of(settings),
        samples=settings.limit,
        maps=settings.maps,
        terms=terms_of(settings),
        controls=True,
        config=EngineConfig(max_batch=settings.batch, prefix_cache=False),
    )
    over_documents = answered(asked, "is not a question over documents")
    places, short = document_places(over_documents, settings.lengths, model)
    if short:
        print(f"questions over documents left out: {'; '.join(short)}", file=sys.stderr)
    documents = DocumentGrid(
        places=places,
        samples=settings.limit,
        first_seed=settings.first_seed,
    )
    return PaperSuite(model, grid, documents, file, about, shared_prompts(settings))

"""The suite `attention` of `keyhole eval`: what sparse attention loses of a text, layer by layer.

It takes --text (several files with commas between), --lengths, --limit, --policies (all of them,
unless some are named), --budgets (1/8,1/16), --terms and its settings, --batch, --prompt-memory.
docs/attention.md says what is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keyhole
from keyhole import drawing
from keyhole.cli.common import flags, outputs, terminal
from keyhole.cli.common.outputs import Output
from keyhole.cli.evaluate import methods_of
from keyhole.config import EngineConfig
from keyhole.errors import ConfigError
from keyhole.eval import comparisons
from keyhole.eval.line_file import LineFile
from keyhole.eval.settings import TAKEN, AttentionSettings
from keyhole.policies import available_policies

if TYPE_CHECKING:
    from keyhole.eval.attention.suite import AttentionOutcome
    from keyhole.eval.forced_text import Windows
    from keyhole.models.loading import Model


def run(arguments: argparse.Namespace) -> int:
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
    outputs.check(
        Output("--output", arguments.output, outputs.LINES),
        Output("--html", arguments.html, outputs.PAGE),
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
        _print(model, outcome, arguments.output)
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


def _print(model: Model, outcome: AttentionOutcome, output: str) -> None:
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

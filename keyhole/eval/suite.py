"""An evaluation from its settings: terms, workloads and grid, and where the lines go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from keyhole.config import EngineConfig
from keyhole.engine.allocation import free_memory
from keyhole.engine.shared_prompt_cache import SharedPromptCache
from keyhole.errors import ConfigError
from keyhole.eval import workloads
from keyhole.eval.methods import Method
from keyhole.eval.results.line_file import LineFile
from keyhole.eval.run import EvalGrid, EvalOutcome, Evaluation
from keyhole.eval.settings import EvalSettings
from keyhole.eval.tasks import Task
from keyhole.eval.terms import GIVEN, Equal, Published, Terms, tuned
from keyhole.eval.terms import equal as equal_terms
from keyhole.models.loading import Model

Header = Callable[[], dict[str, Any]]


def evaluate(
    model: Model,
    settings: EvalSettings,
    tasks: Sequence[Task | str],
    methods: Sequence[Method],
    file: LineFile,
    header: Header,
) -> EvalOutcome:
    """Measures what the file lacks of these tasks and methods.

    With tuned terms, settings are chosen first, by trials in a file beside it. header: how, where
    and when, for a line. ConfigError for what the model or the tasks cannot have.
    """
    # Prompts that are gone must not count as memory in use.
    config = EngineConfig(max_batch=settings.batch, prefix_cache=False)
    if settings.dense_layers is not None:
        equal_terms.check_dense(settings.dense_layers, model.geometry(config.page_size))
    copies = SharedPromptCache(settings.prompt_memory or free_memory(torch.device("cpu")) // 4)
    grid = EvalGrid(
        workloads=workloads.workloads(tasks, settings.text, model, settings.first_seed),
        lengths=settings.lengths,
        setups=tuple(dict.fromkeys(settings.setup)),
        methods=methods,
        samples=settings.limit,
        maps=settings.maps,
        terms=terms_of(settings),
        controls=settings.controls,
        config=config,
    )
    if settings.terms == tuned.Tuned.name:
        terms = _tuned(model, settings, tasks, grid, file, header, copies)
        grid = dataclasses.replace(grid, terms=terms)
    return Evaluation(model, grid, file, header, copies).run()


def terms_of(settings: EvalSettings) -> Terms:
    """The terms; tuned ones are known only once the methods have been tuned."""
    equal = Equal(dense=settings.dense_layers, sinks=settings.sinks, window=settings.window)
    known: dict[str, Terms] = {terms.name: terms for terms in (equal, Published())}
    return known.get(settings.terms, GIVEN)


def _tuned(
    model: Model,
    settings: EvalSettings,
    tasks: Sequence[Task | str],
    grid: EvalGrid,
    file: LineFile,
    header: Header,
    copies: SharedPromptCache,
) -> Terms:
    """Chosen on samples with other seeds, whose lines are in a file beside that of the results."""
    for task in tasks:
        if isinstance(task, str):
            raise ConfigError(f"task {task} has no samples to tune on; leave --terms tuned out")
    if settings.first_seed + settings.limit > tuned.HELD_OUT:
        raise ConfigError(
            f"first_seed {settings.first_seed} and limit {settings.limit} reach the samples from "
            f"{tuned.HELD_OUT} on, which settings are tuned on"
        )
    held_out = workloads.workloads(tasks, None, model, tuned.HELD_OUT)
    geometry = model.geometry(grid.config.page_size)
    dense = settings.dense_layers
    size = len(equal_terms.default_dense(geometry) if dense is None else dense)
    output = LineFile(tuned.sibling(file.path))
    return tuned.tune(
        dataclasses.replace(grid, workloads=held_out, samples=settings.tuning_limit),
        settings.trials,
        size,
        geometry,
        lambda part: Evaluation(model, part, output, header, copies).run(),
    )

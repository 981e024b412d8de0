"""The suite `tasks`: an evaluation from its settings, and tuned terms.

With `--terms tuned` the settings of every method are chosen on samples that the evaluation does not
use; every method gets the same number of trials. Trials are cells like all others, stored in a file
of their own, so that an interrupted search continues.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from keyhole.cache.layout import Geometry
from keyhole.config import EngineConfig
from keyhole.engine.allocation import free_memory
from keyhole.engine.shared_prompt_cache import SharedPromptCache
from keyhole.errors import ConfigError
from keyhole.eval import tuning
from keyhole.eval.forced_text import AttentionRecall, Perplexity, TinyText, WindowedText
from keyhole.eval.line_file import Line, LineFile
from keyhole.eval.methods import (
    GIVEN,
    TOKEN_BUDGET,
    Equal,
    Method,
    Published,
    Terms,
    check_dense,
    default_dense,
    settings_of,
)
from keyhole.eval.run import EvalGrid, EvalOutcome, Evaluation
from keyhole.eval.settings import EvalSettings
from keyhole.eval.tasks import Task
from keyhole.eval.tuning import Chosen
from keyhole.eval.workload import Answered, Workload
from keyhole.models.loading import Model
from keyhole.policies import make_policy
from keyhole.policies.base import Policy

HELD_OUT = 1_000_000
"""Seed of the first sample that settings are chosen on; evaluations begin at 0."""

#: Label, length and budget of what was tuned.
Key = tuple[str, int, int | None]


@dataclass(frozen=True, kw_only=True)
class Tuned(Terms):
    """Each method with the settings that were best on held-out samples."""

    name: ClassVar[str] = "tuned"
    chosen: Mapping[Key, Chosen]

    def policy(self, method: Method, length: int, geometry: Geometry) -> Policy:
        """ConfigError for a method of which no trial could be run."""
        if not is_tuned(method):
            return method.policy(length, geometry.page_size)
        budget = method.tokens(length, geometry.page_size)
        found = self.chosen.get((method.label, length, budget))
        if found is None:
            raise ConfigError(f"{method.label}: no trial could be run with budget {budget}")
        return make_policy(method.name, found.settings)

    def about(self, method: Method, length: int, geometry: Geometry) -> Line:
        """How the settings were chosen."""
        found = self.chosen.get((method.label, length, method.tokens(length, geometry.page_size)))
        if found is None:
            return {}
        told = {"trials": found.trials, "samples": found.samples, "score": found.score}
        return {"terms_note": found.note, "tuning": told | {"first_seed": HELD_OUT}}


def is_tuned(method: Method) -> bool:
    """Whether there is anything to choose: not without a budget."""
    return method.budget is not None or TOKEN_BUDGET in method.settings


def tune(
    grid: EvalGrid,
    number: int,
    dense_size: int,
    geometry: Geometry,
    evaluate: Callable[[EvalGrid], EvalOutcome],
) -> Tuned:
    """Tries `number` settings of each method of a grid and chooses, by length and budget.

    grid: over held-out samples. dense_size: how many layers every trial reads densely. evaluate:
    runs a grid, its lines going to the file of the trials.
    """
    chosen: dict[Key, Chosen] = {}
    for length in grid.lengths:
        tried = {
            (method.label, length, method.tokens(length, geometry.page_size)): _as_methods(
                method, length, geometry, number, dense_size
            )
            for method in grid.methods
            if is_tuned(method)
        }
        every = [one for methods in tried.values() for one in methods]
        part = dataclasses.replace(
            grid, lengths=(length,), methods=every, terms=GIVEN, controls=False, maps=False
        )
        measured = _by_policy(evaluate(part).lines)
        for key, methods in tried.items():
            lines = [measured.get(_known(one, length, geometry), []) for one in methods]
            found = [(one.settings, of_one) for one, of_one in zip(methods, lines, strict=True)]
            best = tuning.best_trial(found, len(list(part.groups())))
            if best is not None:
                chosen[key] = best
    return Tuned(chosen=chosen)


def sibling(output: str | Path) -> Path:
    """The file of the trials beside that of an evaluation."""
    path = Path(output)
    return path.with_name(f"{path.stem}.trials.jsonl")


def _as_methods(
    method: Method, length: int, geometry: Geometry, number: int, dense_size: int
) -> list[Method]:
    found = tuning.trials(method, length, geometry, number, dense_size)
    return [
        Method(label=f"{method.label}, trial {count}", name=method.name, settings=settings)
        for count, settings in enumerate(found, 1)
    ]


def _known(method: Method, length: int, geometry: Geometry) -> str:
    policy = method.policy(length, geometry.page_size).resolve(geometry)
    return json.dumps(settings_of(policy), sort_keys=True)


def _by_policy(lines: Sequence[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        known = {"policy": line["policy"], "settings": line["settings"]}
        found.setdefault(json.dumps(known, sort_keys=True), []).append(line)
    return found


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
        check_dense(settings.dense_layers, model.geometry(config.page_size))
    copies = SharedPromptCache(settings.prompt_memory or free_memory(torch.device("cpu")) // 4)
    grid = EvalGrid(
        workloads=make_workloads(tasks, settings.text, model, settings.first_seed),
        lengths=settings.lengths,
        setups=tuple(dict.fromkeys(settings.setup)),
        methods=methods,
        samples=settings.limit,
        maps=settings.maps,
        terms=terms_of(settings),
        controls=settings.controls,
        config=config,
    )
    if settings.terms == Tuned.name:
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
    if settings.first_seed + settings.limit > HELD_OUT:
        raise ConfigError(
            f"first_seed {settings.first_seed} and limit {settings.limit} reach the samples from "
            f"{HELD_OUT} on, which settings are tuned on"
        )
    held_out = make_workloads(tasks, None, model, HELD_OUT)
    geometry = model.geometry(grid.config.page_size)
    dense = settings.dense_layers
    size = len(default_dense(geometry) if dense is None else dense)
    output = LineFile(sibling(file.path))
    return tune(
        dataclasses.replace(grid, workloads=held_out, samples=settings.tuning_limit),
        settings.trials,
        size,
        geometry,
        lambda part: Evaluation(model, part, output, header, copies).run(),
    )


def make_workloads(
    parsed: Sequence[Task | str], text: str | None, model: Model, first_seed: int = 0
) -> list[Workload]:
    """A workload for each task of `task_specs.parse`; text: the file of those over one.

    first_seed: of samples that are made from seeds. Without a text, the tasks over one take
    derivations in the words of the bundled model. ConfigError for a model without a tokenizer, and
    for a text that cannot be read.
    """
    forced = {cls.name: cls for cls in (Perplexity, AttentionRecall)}
    windows = TinyText(model) if text is None else WindowedText(text, model)
    return [
        forced[task](windows) if isinstance(task, str) else Answered(task, model, first_seed)
        for task in parsed
    ]

"""The suite `tasks`: an evaluation from its settings, and tuned terms.

With `--terms tuned` the settings of every method are chosen on samples that the evaluation does not
use. Random search with a fixed seed: first the method with its first layers dense and defaults
elsewhere, then random combinations of the values below, which are the same for all methods that
have a setting of that name; every method gets the same number of trials. The best mean score wins;
of equal scores the one that reads fewer bytes. An answer in a trial ends where it cannot be right
any more. Trials are ordinary cells, stored in a file of their
own, so an interrupted search can be continued.

Settings that change what the budget means (whether a prompt counts, a selection per query head), or
that save time at the cost of the score (how often a selection is refreshed) are not searched,
because the results compare scores at one budget.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import torch

from keyhole import registry
from keyhole.cache.layout import Geometry
from keyhole.config import EngineConfig
from keyhole.engine.allocation import free_memory
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache
from keyhole.errors import ConfigError
from keyhole.eval.forced_text import AttentionRecall, Perplexity, TinyText, WindowedText
from keyhole.eval.line_file import EvalOutcome, Line, LineFile
from keyhole.eval.methods import (
    FULL_LAYERS,
    GIVEN,
    NO_MORE_DENSE,
    SELECTION_LAYERS,
    TOKEN_BUDGET,
    Equal,
    Method,
    Published,
    Terms,
    check_dense,
    default_dense,
    settings_of,
)
from keyhole.eval.run import EvalGrid, Evaluation
from keyhole.eval.settings import EvalSettings
from keyhole.eval.tasks import Task
from keyhole.eval.workload import Answered, Workload
from keyhole.models.model import Model
from keyhole.policies import available_policies, make_policy
from keyhole.policies.base import Policy


@dataclass(frozen=True)
class Share:
    """A share of the budget in whole pages, at least one; in tokens or in pages."""

    of_budget: Fraction
    in_pages: bool = False

    def at(self, budget: int, page_size: int) -> int:
        """For a budget in tokens."""
        pages = max(1, int(budget * self.of_budget) // page_size)
        return pages if self.in_pages else pages * page_size


_SHARES = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2))

#: None is a method's own default. Values that a method does not allow are skipped.
SPACE: Mapping[str, Sequence[Any]] = {
    "sink_size": (0, 16),
    "window_size": tuple(Share(share) for share in _SHARES),
    "recent_pages": tuple(Share(share, in_pages=True) for share in _SHARES),
    "cluster_size": (8, 16, 32, 80),
    "block_size": (None, 16, 32, 64),
    "outlier_chunks": (None, 0, 1, 2, 4),
    "rank": (None, 0),
    "alpha": (1e-4, 1e-3, 1e-2, 1e-1),
    "per_head": (True, False),
    "mix_lambda": (0.05, 0.1, 0.3, 0.6),
    "kernel_size": (5, 7),
}

#: Position of the last dense layer, as a share of the full-attention layers.
_DEPTHS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))


def dense_sets(geometry: Geometry, size: int) -> list[tuple[int, ...]]:
    """A few sets of `size` dense layers: the first ones; all but one of these and a deeper one; the
    same number, evenly spread.

    All of them contain the first full-attention layer, because a method with selection layers reads
    everything before the first of these.
    """
    usable = geometry.full_attention
    size = min(size, len(usable))
    if size == 0:
        return [()]
    first = usable[: size - 1]
    deeper = [usable[min(len(usable) - 1, int(len(usable) * share))] for share in _DEPTHS]
    spread = tuple(usable[len(usable) * i // size] for i in range(size))
    found = [usable[:size], *((*first, layer) for layer in deeper if layer not in first), spread]
    if size > 1:
        found = [one for one in found if one[0] == usable[0]]
    return list(dict.fromkeys(found))


def layer_settings(
    fields: Collection[str], geometry: Geometry, size: int
) -> Iterator[dict[str, Any]]:
    """Settings that give a policy with these fields `size` dense layers; {} for a policy without
    such settings.
    """
    selecting = [name for name in SELECTION_LAYERS if name in fields]
    if FULL_LAYERS not in fields:
        yield {}
        return
    for dense in dense_sets(geometry, size):
        if not selecting:
            yield {FULL_LAYERS: dense}
        for begin in range(len(dense) if selecting else 0):
            # Everything before the first selection layer is read; it must be in the set anyway.
            if dense[: begin + 1] == geometry.full_attention[: begin + 1]:
                layers = {FULL_LAYERS: dense[:begin]} | dict.fromkeys(selecting, dense[begin:])
                yield layers | {
                    name: NO_MORE_DENSE[name] for name in NO_MORE_DENSE if name in fields
                }


def combinations(
    fields: Collection[str], geometry: Geometry, size: int, budget: int
) -> Iterator[dict[str, Any]]:
    """Every combination of values for a policy with these fields."""
    names = [name for name in SPACE if name in fields]
    values = [
        [
            value.at(budget, geometry.page_size) if isinstance(value, Share) else value
            for value in SPACE[name]
        ]
        for name in names
    ]
    for layers in layer_settings(fields, geometry, size):
        for chosen in itertools.product(*values):
            yield layers | dict(zip(names, chosen, strict=True))


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The best of a method's trials.

    settings: all settings of the trial, including the budget. score: on the held-out samples,
    `samples` for each task.
    """

    settings: Mapping[str, Any]
    score: float
    trials: int
    samples: int

    @property
    def note(self) -> str:
        """A remark for tables."""
        return f"best of {self.trials} trials on held-out samples ({100 * self.score:.1f} %)"


def trials(
    method: Method, length: int, geometry: Geometry, number: int, dense_size: int
) -> list[dict[str, Any]]:
    """At most `number` settings to try with a budget; the policy's name determines their order.

    Combinations that this model cannot run are skipped, and those that resolve to the same policy
    count once. Settings of the user are kept. dense_size: the number of dense layers of each trial,
    for a policy whose dense layers can be set.
    """
    fields = available_policies()[method.name].__dataclass_fields__
    free = [name for name in fields if name not in (*method.settings, TOKEN_BUDGET)]
    budget = method.tokens(length, geometry.page_size)
    assert budget is not None
    every = list(combinations(free, geometry, dense_size, budget))
    random.Random(method.name).shuffle(every)
    usual = next(layer_settings(free, geometry, dense_size))
    found: dict[str, dict[str, Any]] = {}
    for settings in (usual, *every):
        try:
            given = {**method.settings, **settings, TOKEN_BUDGET: budget}
            policy = make_policy(method.name, given).resolve(geometry)
        except ConfigError:
            continue
        if _has_size(policy, free, geometry, dense_size):
            found.setdefault(json.dumps(settings_of(policy)), given)
        if len(found) == number:
            break
    return list(found.values())


def best_trial(
    tried: Sequence[tuple[Mapping[str, Any], Sequence[Line]]], places: int
) -> Chosen | None:
    """The best of these settings, each with its lines; None if none was measured at all places."""
    found: Chosen | None = None
    least: tuple[float, float] | None = None
    for settings, lines in tried:
        if len(lines) < places:  # refused somewhere
            continue
        score = statistics.fmean(line["score"] for line in lines)
        rank = (score, -statistics.fmean(line["bytes_per_step"] or 0 for line in lines))
        if least is None or rank > least:
            samples = min(line["samples"] for line in lines)
            found = Chosen(settings=settings, score=score, trials=len(tried), samples=samples)
            least = rank
    return found


def _has_size(policy: Policy, free: Collection[str], geometry: Geometry, dense_size: int) -> bool:
    if FULL_LAYERS not in free:
        return True
    return len(policy.dense_layers(geometry)) == min(dense_size, len(geometry.full_attention))


HELD_OUT = 1_000_000
"""Seed of the first sample for tuning; evaluations begin at 0."""

#: Label, length and budget of a tuned method.
Key = tuple[str, int, int | None]


@dataclass(frozen=True, kw_only=True)
class Tuned(Terms):
    """Each method with the settings that scored best on held-out samples."""

    name: ClassVar[str] = "tuned"
    chosen: Mapping[Key, Chosen]

    def policy(self, method: Method, length: int, geometry: Geometry) -> Policy:
        """ConfigError for a method without a successful trial."""
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
        tuning = {"trials": found.trials, "samples": found.samples, "score": found.score}
        return {"terms_note": found.note, "tuning": tuning | {"first_seed": HELD_OUT}}


def is_tuned(method: Method) -> bool:
    """Whether there are settings to tune: only with a budget."""
    return method.budget is not None or TOKEN_BUDGET in method.settings


def tune(
    grid: EvalGrid,
    number: int,
    dense_size: int,
    geometry: Geometry,
    evaluate: Callable[[EvalGrid], EvalOutcome],
) -> Tuned:
    """Tries `number` settings of each method of a grid and chooses, for each length and budget.

    grid: over held-out samples. dense_size: number of layers that every trial reads densely.
    evaluate: runs a grid, with its lines going to the file of the trials.
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
            grid,
            lengths=(length,),
            methods=every,
            terms=GIVEN,
            controls=False,
            maps=False,
            prefill=(),
        )
        measured = _by_policy(evaluate(part).lines)
        for key, methods in tried.items():
            lines = [measured.get(_known(one, length, geometry), []) for one in methods]
            found = [(one.settings, of_one) for one, of_one in zip(methods, lines, strict=True)]
            best = best_trial(found, len(list(part.groups())))
            if best is not None:
                chosen[key] = best
    return Tuned(chosen=chosen)


def sibling(output: str | Path) -> Path:
    """The file of the trials, next to that of the evaluation."""
    path = Path(output)
    return path.with_name(f"{path.stem}.trials.jsonl")


def _as_methods(
    method: Method, length: int, geometry: Geometry, number: int, dense_size: int
) -> list[Method]:
    found = trials(method, length, geometry, number, dense_size)
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
    """Measures the cells of these tasks and methods that the file lacks.

    With tuned terms, settings are chosen first, in trials whose lines go to a second file. header:
    makes the fields of a line for how, where and when. ConfigError for a case that the model or the
    tasks do not allow.
    """
    # Prompts that are no longer needed must not count as memory in use.
    config = EngineConfig(max_batch=settings.batch, prefix_cache=False, kv_dtype=settings.kv_dtype)
    if settings.terms in (Equal.name, Tuned.name):
        geometry, dense = model.geometry(config.page_size), settings.dense_layers
        check_dense(default_dense(geometry) if dense is None else dense, geometry)
    copies = shared_prompts(settings)
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
        prefill=[spec.text for spec in registry.parse(settings.prefill_policies)],
    )
    if settings.terms == Tuned.name:
        terms = _tuned(model, settings, tasks, grid, file, header, copies)
        grid = dataclasses.replace(grid, terms=terms)
    return Evaluation(model, grid, file, header, copies).run()


def shared_prompts(settings: EvalSettings) -> SharedPromptCache:
    """For prompts that are computed once for all policies."""
    return SharedPromptCache(settings.prompt_memory or free_memory(torch.device("cpu")) // 4)


def terms_of(settings: EvalSettings) -> Terms:
    """The terms; tuned terms are known only after tuning."""
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
    """Settings tuned on samples with other seeds, whose lines are in a second file."""
    for task in tasks:
        if isinstance(task, str):
            raise ConfigError(f"task {task} has no samples to tune on; choose other --terms")
    if settings.first_seed + settings.limit > HELD_OUT:
        raise ConfigError(
            f"first_seed {settings.first_seed} and limit {settings.limit} reach the samples from "
            f"{HELD_OUT} on, which are reserved for tuning"
        )
    held_out = make_workloads(tasks, None, model, HELD_OUT, only_scores=True)
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
    parsed: Sequence[Task | str],
    text: str | None,
    model: Model,
    first_seed: int = 0,
    *,
    only_scores: bool = False,
) -> list[Workload]:
    """A workload for each task of `tasks.parse`; text: the file for teacher-forced tasks.

    first_seed: the number of the first sample, or of the first window of a text. only_scores: as in
    `Answered`. Without a text,
    tasks that force one use derivations in the vocabulary of the bundled model. ConfigError for a
    model without a tokenizer, and for a text that cannot be read.
    """
    forced = {cls.name: cls for cls in (Perplexity, AttentionRecall)}
    windows = TinyText(model) if text is None else WindowedText(text, model)
    return [
        forced[task](windows, first_seed)
        if isinstance(task, str)
        else Answered(task, model, first_seed, only_scores=only_scores)
        for task in parsed
    ]

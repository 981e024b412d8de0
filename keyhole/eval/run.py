"""Runs an evaluation cell by cell; stored cells are not measured again, refused ones are reported.

Full attention comes first in every group of cells that share task, length and setup, because the
others are compared with it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from keyhole.config import EngineConfig
from keyhole.engine.documents.fingerprint import fingerprint
from keyhole.engine.engine import Engine
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache
from keyhole.errors import ConfigError, KeyholeError
from keyhole.eval import policy_trace
from keyhole.eval.line_file import EvalOutcome, Line, LineFile
from keyhole.eval.methods import (
    FULL,
    GIVEN,
    TOKEN_BUDGET,
    Condition,
    Method,
    Terms,
    conditions_at,
    prefill_conditions,
)
from keyhole.eval.workload import Workload
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from keyhole.policies.prefill.base import PrefillPolicy


@dataclass(frozen=True, kw_only=True)
class EvalGrid:
    """All combinations of these are cells; `methods` as returned by `methods.under_budgets`.

    maps: whether to store selection maps, for each sparse policy under its first budget. terms: how
    methods become policies. controls: whether the controls of each method are measured, too.
    prefill: prefill policies, as the user wrote them.
    """

    workloads: Sequence[Workload]
    lengths: Sequence[int]
    setups: Sequence[str]
    methods: Sequence[Method]
    samples: int
    config: EngineConfig
    maps: bool = False
    terms: Terms = GIVEN
    controls: bool = False
    prefill: Sequence[str] = ()

    def is_mapped(self, method: Method) -> bool:
        """Whether this method's cells get selection maps; one budget is enough."""
        return self.maps and method is next(m for m in self.methods if m.label == method.label)

    def groups(self) -> Iterator[Group]:
        """Groups of cells that differ only in the policy; without a question, the setups are the
        same.
        """
        for workload in self.workloads:
            for length in self.lengths:
                samples = workload.available(length, self.samples)
                for setup in self.setups if workload.has_question else ("prompt",):
                    yield Group(workload=workload, length=length, setup=setup, samples=samples)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cells that share one measurement of full attention."""

    workload: Workload
    length: int
    setup: str
    samples: int

    def fields(self) -> dict[str, Any]:
        """The fields of a line."""
        return {
            "task": self.workload.name,
            "task_settings": self.workload.settings,
            "length": self.length,
            "setup": self.setup,
        }


class Evaluation:
    """A grid over a model, and the file of its lines.

    header: makes the fields of a line for how, where and when. copies: keep the computed prompts of
    a group for all policies; None: every policy computes them. ConfigError, before anything runs,
    for a length that the model or a task does not allow.
    """

    def __init__(
        self,
        model: Model,
        grid: EvalGrid,
        file: LineFile,
        header: Callable[[], dict[str, Any]],
        copies: SharedPromptCache | None = None,
    ) -> None:
        self._model, self._grid, self._file, self._header = model, grid, file, header
        self._copies = copies
        for length in grid.lengths:
            require_length(model, length)
        list(grid.groups())  # checks every task
        self._fingerprint = model_digest(model)
        self._geometry = model.geometry(grid.config.page_size)

    def run(self) -> EvalOutcome:
        """Measures the cells that the file lacks and adds each as soon as it is done."""
        outcome, groups = EvalOutcome(), list(self._grid.groups())
        self._before = set(map(id, self._file.lines))
        asked = {length: self._asked(length) for length in self._grid.lengths}
        total = sum(len(asked[group.length]) for group in groups)
        bar = tqdm(total=total, unit="cell", disable=None)
        gc.freeze()  # objects made before need not be visited by `release_engines` each time
        try:
            with bar:
                for group in groups:
                    full: Line | None = None
                    if self._copies is not None:
                        self._copies.begin(group.fields())
                    for one in asked[group.length]:
                        bar.set_description(f"{group.workload.name} {group.length} {one.label}")
                        line = self._cell(group, one, full, outcome)
                        full = line if one.method is FULL else full
                        bar.update()
        finally:
            gc.unfreeze()
        return outcome

    def missing(self) -> list[tuple[Group, int, int]]:
        """Every group, its number of cells, and how many of them the file lacks.

        Cells that this model cannot run are not counted.
        """
        found = []
        asked = {length: self._asked(length) for length in self._grid.lengths}
        for group in self._grid.groups():
            cells = [one for one in asked[group.length] if one.error is None]
            lacking = [
                one
                for one in cells
                if self._file.find(self._fields(group, one.measured), group.samples) is None
            ]
            found.append((group, len(cells), len(lacking)))
        return found

    def _asked(self, length: int) -> list[Condition]:
        grid = self._grid
        found = conditions_at(grid.methods, grid.terms, length, self._geometry, grid.controls)
        return found + prefill_conditions(grid.prefill, self._geometry, grid.controls)

    def _cell(
        self, group: Group, one: Condition, full: Line | None, outcome: EvalOutcome
    ) -> Line | None:
        """One cell: from the file, measured, or refused (None); full: the line of full
        attention.
        """
        try:
            if one.error is not None:
                raise one.error
            fields = self._fields(group, one.measured)
            stored = self._file.find(fields, group.samples, one.known_by)
            found = line = stored
            if stored is None:  # the same policy may have been measured for another purpose
                found = self._file.find(fields, group.samples)
                line = found and one.instead_of(found)
            line = line or self._measured(group, one, full) | fields
            if self._lacks_maps(line, one):
                line = line | {"selection_maps": self._maps(group, one.policy)}
        except KeyholeError as error:
            outcome.refused.append(group.fields() | one.refused(error) | {"samples": group.samples})
            return None
        finally:
            release_engines(self._model)
        if line is not stored:
            self._file.add(line)
        if line not in outcome.lines:  # two budgets may be equal
            outcome.lines.append(line)
            outcome.stored += id(found) in self._before
        return line

    def _measured(self, group: Group, one: Condition, full: Line | None) -> Line:
        """A line without the fields that identify the cell."""
        make = functools.partial(self._engine, prefill=one.prefill)
        found = group.workload.measure(make, one.policy, group.length, group.setup, group.samples)
        beside = {} if full is None else group.workload.beside(found, full)
        about = {"model": self._model.name, "samples": group.samples}
        return self._header() | about | found | beside | one.about

    def _lacks_maps(self, line: Line, one: Condition) -> bool:
        sparse = one.control is None and not one.policy.dense
        wanted = sparse and self._grid.is_mapped(one.method)
        return wanted and line.get("selection_maps") is None

    def _maps(self, group: Group, policy: Policy) -> list[dict[str, Any]]:
        """Maps of the first sample; none if it is answered without a decode step."""
        release_engines(self._model)
        shown = group.workload.shown(group.length, group.setup)
        layers = policy_trace.mapped_layers(self._geometry)
        return policy_trace.selection_maps(self._engine, policy, shown, layers)

    def _engine(self, policy: Policy, prefill: PrefillPolicy | None = None) -> Engine:
        config = self._grid.config
        if prefill is not None:
            config = dataclasses.replace(config, prefill_policy=prefill.text)
        return Engine(self._model, policy, config, copies=self._copies)

    def _fields(self, group: Group, policy: Policy | PrefillPolicy) -> dict[str, Any]:
        """The fields that identify a cell: lines that agree in all of them are the same
        measurement.
        """
        settings = dataclasses.asdict(policy)
        config = self._grid.config
        return as_stored(
            {
                **group.fields(),
                "fingerprint": self._fingerprint,
                "policy": policy.name,
                "settings": settings,
                "budget": settings.get(TOKEN_BUDGET),
                "engine": {
                    "max_batch": config.max_batch,
                    "page_size": config.page_size,
                    **({} if config.kv_dtype == "auto" else {"kv_dtype": config.kv_dtype}),
                },
            }
        )


def release_engines(model: Model) -> None:
    """Frees the memory of a model's engines: the next one uses what is free when it is made."""
    model.unwatch()  # hidden states for a retrieval head
    gc.collect()  # engine and scheduler refer to each other
    torch.cuda.empty_cache()  # no effect without a GPU


def require_length(model: Model, length: int) -> None:
    """ConfigError for a length that the model does not allow."""
    if length > model.max_length:
        raise ConfigError(
            f"length {length} is more than the {model.max_length} tokens that {model.name} takes "
            f"({model.length_reason})"
        )


def as_stored(line: Line) -> Line:
    """A line as it is read again: lists for tuples."""
    return dict(json.loads(json.dumps(line)))


def model_digest(model: Model) -> str:
    """A digest of the model's weights, tokenizer, dtype and shape."""
    found = json.dumps(fingerprint(model), sort_keys=True)
    return hashlib.sha256(found.encode()).hexdigest()[:16]

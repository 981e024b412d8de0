"""What the suite measures: the cells of a grid, each with its policy and controls, resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keyhole.cache.layout import Geometry
from keyhole.config import EngineConfig
from keyhole.errors import KeyholeError
from keyhole.eval.attention.settings import TWIN_TEXTS
from keyhole.eval.methods import Budget, Method
from keyhole.eval.results.conditions import settings_of
from keyhole.eval.results.line_file import Line
from keyhole.eval.terms import GIVEN, Terms
from keyhole.eval.terms import controls as eval_controls
from keyhole.eval.workloads.perplexity import Windows
from keyhole.policies.base import Policy

#: `measured` of a line, and its `weights`.
LOSS, OVERLAP = "loss", "overlap"
TRAINED, RANDOM = "trained", "random"
#: The policy itself, among its controls.
METHOD = "method"


@dataclass(frozen=True, kw_only=True)
class AttentionCell:
    """A policy with its controls, or (method None) the overlap of top lists.

    policies: the policy under `METHOD` and its controls, resolved. error: why there are none.
    """

    length: int
    budget: int | None
    method: Method | None = None
    policies: Mapping[str, Policy] = field(default_factory=dict)
    terms: str = GIVEN.name
    error: KeyholeError | None = None

    @property
    def label(self) -> str:
        """What is measured."""
        return self.method.label if self.method else OVERLAP

    @property
    def controls(self) -> dict[str, Line]:
        """Policies and settings of the controls, as a line has them."""
        return {name: settings_of(one) for name, one in self.policies.items() if name != METHOD}

    @property
    def known(self) -> Line:
        """What a line of this cell is known by, besides the steps that it saw."""
        if self.method is None:
            return {"measured": OVERLAP, "budget": self.budget}
        return {
            "measured": LOSS,
            "budget": self.budget,
            **settings_of(self.policies[METHOD]),
            "controls": self.controls,
            "terms": self.terms,
        }


@dataclass(frozen=True, kw_only=True)
class AttentionGrid:
    """Every method under every budget at every length, on as many of `texts` windows as there are.

    terms: how methods become policies.
    """

    windows: Windows
    lengths: Sequence[int]
    methods: Sequence[Method]
    budgets: Sequence[Budget]
    texts: int
    config: EngineConfig
    terms: Terms = GIVEN

    def samples(self, cell: AttentionCell, weights: str) -> int:
        """Texts of a cell; the random twin reads fewer."""
        texts = min(self.texts, self.windows.windows(cell.length))
        return texts if weights == TRAINED else min(texts, TWIN_TEXTS)

    def cells(self, geometry: Geometry) -> list[AttentionCell]:
        """By length: the overlap under every budget, then every method; each once."""
        found: dict[Any, AttentionCell] = {}
        for length in self.lengths:
            for budget in self.budgets:
                tokens = budget.at(length, self.config.page_size)
                found.setdefault((length, tokens), AttentionCell(length=length, budget=tokens))
            for method in self.methods:
                cell = self._cell(method, length, geometry)
                found.setdefault((length, cell.budget, cell.label), cell)
        return list(found.values())

    def _cell(self, method: Method, length: int, geometry: Geometry) -> AttentionCell:
        budget = method.tokens(length, self.config.page_size)
        try:
            policy = self.terms.policy(method, length, geometry).resolve(geometry)
            controls = eval_controls.controls(policy, geometry)
            resolved = {name: one.resolve(geometry) for name, one in controls.items()}
        except KeyholeError as error:
            return AttentionCell(length=length, budget=budget, method=method, error=error)
        return AttentionCell(
            length=length,
            budget=budget,
            method=method,
            policies={METHOD: policy} | resolved,
            terms=self.terms.name,
        )

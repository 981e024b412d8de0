"""On which terms the methods of an evaluation are set up; tables of different terms never mix.

given       as the user writes them, defaults otherwise
equal       one dense set, one number of sinks, one window and one budget for all
published   as each paper, or its authors' code, has it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from keyhole.cache.layout import Geometry
from keyhole.errors import ConfigError
from keyhole.eval.methods import TOKEN_BUDGET, Method
from keyhole.eval.results.line_file import Line
from keyhole.eval.terms import equal
from keyhole.policies import available_policies, make_policy
from keyhole.policies.base import Policy


class Terms(ABC):
    """How a method becomes a policy. `name`: as `--terms` and the lines of a file say it."""

    name: ClassVar[str]

    @abstractmethod
    def policy(self, method: Method, length: int, geometry: Geometry) -> Policy:
        """The policy for a text of so many tokens. ConfigError for what it cannot have."""

    def about(self, method: Method, length: int, geometry: Geometry) -> Line:
        """More fields of the line: `terms_note` is what a reader has to know of this method."""
        return {}


class Given(Terms):
    """As the user writes them."""

    name = "given"

    def policy(self, method: Method, length: int, geometry: Geometry) -> Policy:
        """The settings that were given, defaults otherwise."""
        return method.policy(length, geometry.page_size)


GIVEN = Given()


@dataclass(frozen=True, kw_only=True)
class Equal(Terms):
    """One dense set, sinks, window and budget. None: the defaults of `equal_terms`."""

    name: ClassVar[str] = "equal"
    dense: tuple[int, ...] | None = None
    sinks: int = 16
    window: int | None = None

    def policy(self, method: Method, length: int, geometry: Geometry) -> Policy:
        """UnequalTermsError for a method that cannot be set up so."""
        budget = method.tokens(length, geometry.page_size)
        if budget is None:
            return method.policy(length, geometry.page_size)
        dense, window = self.dense, self.window
        settings = {k: v for k, v in method.settings.items() if k != TOKEN_BUDGET}
        return equal.equal_terms(
            method.name,
            geometry,
            budget,
            equal.default_dense(geometry) if dense is None else equal.check_dense(dense, geometry),
            self.sinks,
            equal.default_window(budget, geometry.page_size) if window is None else window,
            settings,
        )

    def about(self, method: Method, length: int, geometry: Geometry) -> Line:
        """What a method lacks by its definition."""
        return {"terms_note": "; ".join(equal.BY_DEFINITION.get(method.name, {}).values())}


class Published(Terms):
    """As each paper, or its authors' code, has it."""

    name = "published"

    def policy(self, method: Method, length: int, geometry: Geometry) -> Policy:
        """ConfigError for a method with settings of the user's besides the budget."""
        budget = method.tokens(length, geometry.page_size)
        own = {k: v for k, v in method.settings.items() if k != TOKEN_BUDGET}
        if own:
            raise ConfigError(f"{method.label}: as published, a method has no other settings")
        if budget is None:
            return make_policy(method.name)
        return available_policies()[method.name].as_published(geometry, budget)

"""Policies and budgets of an evaluation: as they were asked for, and for a length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Self

from keyhole.config import is_count
from keyhole.errors import ConfigError
from keyhole.policies import available_policies, make_policy
from keyhole.policies.base import Policy

TOKEN_BUDGET = "token_budget"
"""The setting that is a policy's budget."""

_RIGHT = "a number of tokens, at least 1, or a share of the length such as 1/8"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Tokens that a step may read: a number, or a share of the length."""

    text: str
    tokens: int | None = None
    share: Fraction | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """From 256, 1/8 or 0.125. ConfigError for anything else."""
        try:
            if "/" in text or "." in text:
                share = Fraction(text)
                if 0 < share <= 1:
                    return cls(text=text, share=share)
            elif is_count(int(text)):
                return cls(text=text, tokens=int(text))
        except (ValueError, ZeroDivisionError):
            pass
        raise ConfigError(f"budget {text!r} must be {_RIGHT}")

    def at(self, length: int, page_size: int) -> int:
        """In tokens; a share is whole pages, at least one, so that all methods get as much."""
        if self.share is None:
            assert self.tokens is not None
            return self.tokens
        return max(1, int(length * self.share) // page_size) * page_size


@dataclass(frozen=True, kw_only=True)
class Method:
    """A policy as it was asked for; `label` is how it was written."""

    label: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | None = None

    def policy(self, length: int, page_size: int) -> Policy:
        """The policy for a text of so many tokens. ConfigError for what it cannot have."""
        tokens = self.tokens(length, page_size)
        budget = {} if tokens is None else {TOKEN_BUDGET: tokens}
        return make_policy(self.name, {**self.settings, **budget})

    def tokens(self, length: int, page_size: int) -> int | None:
        """The budget in tokens; None for a policy that has none."""
        if self.budget is None:
            return self.settings.get(TOKEN_BUDGET)
        return self.budget.at(length, page_size)


FULL = Method(label="full", name="full")


def methods(given: Sequence[Method], budgets: Sequence[Budget]) -> list[Method]:
    """Full attention, the reference, and every other policy under every budget.

    A policy that brings its own budget, or has none, stands once.
    """
    found = [FULL]
    for method in given:
        cls = available_policies().get(method.name)
        names = [f.name for f in dataclasses.fields(cls)] if cls is not None else []
        if TOKEN_BUDGET in names and TOKEN_BUDGET not in method.settings:
            found += [dataclasses.replace(method, budget=budget) for budget in budgets]
        elif method.name != FULL.name:
            found.append(method)
    return found

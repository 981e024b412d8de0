"""Policies in a form that vLLM can run: they select whole pages and keep no state per sequence.

vLLM's attention reads through page tables, so a selection must be a list of pages. A policy that
selects tokens selects pages here, by treating each page as one token: budgets, windows and lengths
are counted in pages, and the score of a page is the sum over its tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import is_count, require
from keyhole.errors import ConfigError
from keyhole.policies.base import Policy, ScoreRequest, Selection, Step, whole_entries

if TYPE_CHECKING:
    from torch import Tensor

#: Settings, counted in tokens, of the policies that select tokens.
_TOKEN_SETTINGS = {
    "sliding_window": ("token_budget",),
    "streaming_llm": ("token_budget", "sink_size"),
    "omnikv": ("token_budget", "sink_size", "window_size"),
}


@dataclass(frozen=True)
class ByPages(Policy):
    """`inner`, a policy that selects tokens, at the resolution of pages.

    token_budget is rounded down to whole pages, sink_size and window_size are rounded up. `coarse`
    is the policy with these numbers, set by `resolve`.
    """

    inner: Policy
    coarse: Policy | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.inner.name)

    def __getattr__(self, name: str) -> Any:
        # Settings that the engine reads, such as token_budget. While it is copied, `inner` is
        # missing.
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves `inner` and its version in pages. ConfigError for a budget below a page."""
        inner, size = self.inner.resolve(geometry), geometry.page_size
        given = {name: getattr(inner, name) for name in _TOKEN_SETTINGS[inner.name]}
        budget = given["token_budget"]
        right = f"at least one page of {size} tokens: vLLM reads whole pages"
        require(is_count(budget, size), "token_budget", budget, right)
        pages = {
            name: None if value is None else whole_entries(value, size)
            for name, value in given.items()
        }
        pages["token_budget"] = budget // size
        first, last = pages.get("sink_size") or 0, pages.get("window_size") or 1
        least = (first + last) * size
        right = f"at least {least}: {first} pages of {size} for the sinks and {last} for the newest"
        require(budget >= least, "token_budget", budget, right)
        coarse = dataclasses.replace(inner, **pages).resolve(geometry)
        return dataclasses.replace(self, inner=inner, coarse=coarse)

    def dense_layers(self, geometry: Geometry) -> tuple[int, ...]:
        """The dense layers of `inner`."""
        return self.inner.dense_layers(geometry)

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """The scores of `inner`, summed over pages."""
        assert self.coarse is not None
        requests = self.coarse.needs_scores(layer, _in_pages(step))
        return tuple(ScoreRequest(request.reduce, step.page_size) for request in requests)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> Selection | None:
        """Stores the pages that `inner` selects by them for later layers."""
        assert self.coarse is not None
        coarse = _in_pages(step)
        chosen = self.coarse.on_scores(layer, scores, coarse)
        step.shared_selection = _as_pages(coarse.shared_selection, step.page_size)
        return _as_pages(chosen, step.page_size)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The pages that `inner` selects."""
        assert self.coarse is not None
        return _as_pages(self.coarse.select(layer, query, _in_pages(step)), step.page_size)


def _in_pages(step: Step) -> Step:
    """The step in which every page counts as one token."""
    longest = -(-step.max_length // step.page_size)
    return dataclasses.replace(step, lengths=step.pages, max_length=longest, page_size=1)


def _as_pages(selection: Selection | None, page_size: int) -> Selection | None:
    return None if selection is None else dataclasses.replace(selection, unit=page_size)


def page_policy(policy: Policy, geometry: Geometry) -> Policy:
    """The policy in a form that vLLM can run, resolved for a model.

    ConfigError for one that needs what vLLM lacks: a retrieval head or gate, data per sequence, the
    queries of prompts, eviction.
    """
    for wrong, reason in _needs(policy):
        if wrong:
            raise ConfigError(f"policy {policy.name!r} cannot run in vLLM: it {reason}")
    if policy.name in _TOKEN_SETTINGS:
        policy = ByPages(policy)
    return policy.resolve(geometry)


def _needs(policy: Policy) -> list[tuple[bool, str]]:
    cls = type(policy)
    return [
        (policy.wants_head, "selects by a retrieval head, which vLLM does not run"),
        (policy.wants_gate, "selects by a trained gate, which is not loaded into vLLM"),
        (
            cls.sequence_state is not Policy.sequence_state,
            "keeps data per sequence, but in vLLM data can only be kept per page",
        ),
        (cls.page_limit is not Policy.page_limit, "evicts pages, which only vLLM's scheduler may"),
        (
            policy.reads_queries or not policy.shares_pages,
            "needs the queries of a prompt, but vLLM does not cache those of prefixes",
        ),
        (policy.shifts_keys, "attends to low-rank keys"),
        (
            getattr(policy, "keep_generated", False),
            "reads all generated tokens (keep_generated), but vLLM does not tell which these are",
        ),
        (
            policy.name in ("tidal_decode", "random", "oracle"),
            "selects single tokens, but vLLM reads whole pages",
        ),
    ]


def page_data_shapes(policy: Policy, layout: LayerLayout, page_size: int) -> Mapping[str, Any]:
    """Name and shape, per page, of the policy's data of a layer; {} for a layer with a window."""
    return {} if layout.window is not None else policy.page_data(layout, page_size)

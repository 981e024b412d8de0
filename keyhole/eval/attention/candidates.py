"""`Candidates`: several policies that look at one dense run, none of which decides what is read.

The model runs with full attention. Each policy has its side data and its state beside those of the
others, under names of its own, and its hooks are called as in a run of its own. So it chooses by
the queries and keys of the dense model, and what it would lose in a layer changes nothing in the
layers after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.eval.attention.retained import Retained
from keyhole.policies.base import Policy, PromptQueries, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


#: Is shown every full-attention layer of a decode step: its number and queries [B, Hq, D].
Look = Callable[[int, "Tensor", Step], None]


@dataclass(eq=False)
class StepView:
    """Of the step that runs: how each policy sees it. retained: of the policies that evict."""

    steps: list[Step] = field(default_factory=list)
    retained: dict[int, Retained] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Candidates(Policy):
    """Full attention with `policies` beside it; what they see of a step stands in `progress`.

    look: called by every full-attention layer of a decode step, before its attention.
    """

    name: ClassVar[str] = "candidates"
    dense: ClassVar[bool] = True
    capturable: ClassVar[bool | str] = "its policies are called by the host, in every step"

    policies: tuple[Policy, ...] = ()
    look: Look | None = None
    progress: StepView = field(default_factory=StepView)

    def __post_init__(self) -> None:
        # Class variables of a policy; here they follow from the policies inside.
        for name in ("wants_head", "reads_keys", "reads_queries"):
            object.__setattr__(self, name, any(getattr(one, name) for one in self.policies))
        shares = all(one.shares_pages for one in self.policies)
        object.__setattr__(self, "shares_pages", shares)

    def resolve(self, geometry: Geometry) -> Self:
        """Settles the policies; finds those that evict."""
        settled = tuple(one.resolve(geometry) for one in self.policies)
        retained = {
            number: Retained(one, geometry.page_size)
            for number, one in enumerate(settled)
            if one.page_limit(np.ones(1, np.int64), geometry.page_size) is not None
        }
        return dataclasses.replace(self, policies=settled, progress=StepView(retained=retained))

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """That of all policies."""
        return _joined([one.page_data(layout, page_size) for one in self.policies])

    def sequence_state(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        """That of all policies."""
        return _joined([one.sequence_state(geometry) for one in self.policies])

    def sequence_numbers(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        """Those of all policies."""
        return _joined([one.sequence_numbers(geometry) for one in self.policies])

    def on_append(
        self, key_pages: Tensor, data: Mapping[str, Tensor], pages: Tensor, filled: Tensor
    ) -> None:
        """Brings the side data of every policy up to date."""
        for number, one in enumerate(self.policies):
            own = _own(number, data)
            if own:
                one.on_append(key_pages, own, pages, filled)

    def reusable(self, known: int, page_size: int) -> int:
        """What all of them can use."""
        return min([known, *(one.reusable(known, page_size) for one in self.policies)])

    def on_prompt_queries(
        self, layer: int, queries: PromptQueries, options: Mapping[str, Any]
    ) -> None:
        """Shows them to every policy that reads queries."""
        for number, one in enumerate(self.policies):
            if one.reads_queries:
                own = dataclasses.replace(queries, data=_own(number, queries.data))
                one.on_prompt_queries(layer, own, options)

    def on_queries(self, layer: int, query: Tensor, step: Step, options: Mapping[str, Any]) -> None:
        """Shows them to every policy that reads queries, each with its own step."""
        for one, own in zip(self.policies, self.progress.steps, strict=True):
            if one.reads_queries:
                one.on_queries(layer, query, own, options)

    def before_step(self, step: Step) -> None:
        """Gives each policy a step of its own, and lets it choose before the first layer."""
        retained = self.progress.retained
        self.progress.steps = [
            dataclasses.replace(
                step,
                sequences=dataclasses.replace(
                    step.sequences, state=_own(number, step.sequences.state)
                ),
                cache=dataclasses.replace(
                    step.cache, page_data=[_own(number, data) for data in step.cache.page_data]
                ),
                retained=retained[number].view(step) if number in retained else None,
            )
            for number in range(len(self.policies))
        ]
        for one, own in zip(self.policies, self.progress.steps, strict=True):
            one.before_step(own)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """Everything, after a look."""
        if self.look is not None:
            self.look(layer, query, step)
        return None

    def after_step(self, step: Step) -> Tensor | None:
        """Takes from each policy that evicts the pages that it gives up; the cache keeps them."""
        for number, (one, own) in enumerate(zip(self.policies, self.progress.steps, strict=True)):
            victims = one.after_step(own)
            if victims is not None:
                self.progress.retained[number].evict(own, victims)
        return None


def _joined(parts: list[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    return {
        f"{number} {name}": shape
        for number, part in enumerate(parts)
        for name, shape in part.items()
    }


def _own(number: int, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{number} "
    return {name[len(start) :]: x for name, x in named.items() if name.startswith(start)}

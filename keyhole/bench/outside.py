"""A system in a process of its own, beside those of `keyhole bench decode`: what it must offer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from keyhole.bench.model import RandomKV, Weights
from keyhole.models.loading import Model


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that it takes beside ours, and how many more while its cache is filled."""

    stays: int
    passes: int


class OutsidePeer(Protocol):
    """One such system with a cache of its own. `step_ms`, `peak_bytes`: of its last step."""

    name: str
    step_ms: float
    peak_bytes: int

    def fill(self, numbers: RandomKV) -> None:
        """Gives it the past of all sequences."""
        ...

    def logits(self, prompts: list[list[int]], given: list[int]) -> Tensor:
        """As `KeyholeSystem.logits`."""
        ...

    def start(self, prompts: list[list[int]], steps: int) -> None:
        """Sets the tokens that the next step begins with."""
        ...

    def step(self) -> None:
        """One token for every sequence, greedy."""
        ...

    def settle(self) -> None:
        """Waits until its threads rest."""
        ...

    def rest(self) -> None:
        """Takes the steps back."""
        ...

    def cost(self) -> dict[str, Any]:
        """What one step must read, and what the process should take."""
        ...

    def close(self) -> None:
        """Ends the process."""
        ...


class Outside(Protocol):
    """Systems over our weights in processes of their own, measured one after the other."""

    names: Collection[str]

    def write(self, weights: Weights) -> None:
        """Gives it the weights, once."""
        ...

    def needed(self, model: Model, batch: int, context: int, steps: int) -> Need:
        """What one of them takes, before it is started."""
        ...

    def start(self, name: str, model: Model, batch: int, context: int, steps: int) -> OutsidePeer:
        """Starts one. steps: the most that are added to the context."""
        ...

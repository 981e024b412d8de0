"""The evaluation grid of docs/results/: finds, names and compares its cells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.eval.report.cells import Cell
from keyhole.policies import available_policies

FULL = "full"
BUDGETS = (64, 128, 256, 512, 1024)
_ADAPTIVE = "recall"
#: Settings that list the layers that read everything.
_DENSE = ("full_layers", "delta_layers", "selection_layers", "filter_layers")


@dataclass(frozen=True, kw_only=True)
class PageTask:
    """A task of the page. setup: what is read densely; see `keyhole.eval.report.cells.SETUPS`."""

    title: str
    setup: str
    about: str


_READ = "The text is read densely, the question and the answer go through the policy."
ASKED = {
    "tiny_derive": PageTask(
        title="Long derivations",
        setup="prompt",
        about="A program of sums in random order is carried out step by step: two thirds of the "
        "text are the model's own, and every step needs rules of the prompt and an earlier result.",
    ),
    "tiny_recall": PageTask(
        title="One fact in filler",
        setup="question",
        about=f"One of the facts in a text that is mostly filler. {_READ}",
    ),
    "tiny_documents_two_hop": PageTask(
        title="Two hops over documents",
        setup="question",
        about=f"The first half of the answer is in one of three documents, the second in "
        f"another. {_READ}",
    ),
    "tiny_multikey": PageTask(
        title="Key and value",
        setup="question",
        about=f"One fact from a text that consists only of similar facts. {_READ}",
    ),
}
"""The tasks in the order of the page."""


class TaskCells:
    """Cells of one task, by name, length and budget."""

    def __init__(self, own: Sequence[Cell]) -> None:
        self._found = {(cell.name, cell.place.length, cell.budget): cell for cell in own}

    def get(self, name: str, length: int, budget: int | None) -> Cell | None:
        """A cell, or None."""
        return self._found.get((name, length, budget))

    def full(self, length: int) -> Cell | None:
        """Full attention at a length."""
        return self.get(FULL, length, None)

    def row(self, name: str, heads: Sequence[tuple[int, int]]) -> list[Cell | None]:
        """The cells at these lengths and budgets; full attention has no budget."""
        return [self.full(n) if name == FULL else self.get(name, n, budget) for n, budget in heads]


def named(cell: Cell) -> Cell:
    """The cell named by its policy, with ", adaptive" for an adaptive budget."""
    adaptive = ", adaptive" if cell.settings.get(_ADAPTIVE) is not None else ""
    return dataclasses.replace(cell, name=f"{cell.policy}{adaptive}")


def dense_layers(settings: Mapping[str, Any]) -> list[int]:
    """Layers that read everything in every step, selection layers included.

    settings: a policy's resolved settings, as stored in a line.
    """
    lists = (settings.get(name) or () for name in _DENSE)
    return sorted({layer for layers in lists for layer in layers})


def fixed(found: Sequence[Cell]) -> list[Cell]:
    """The cells with a fixed budget."""
    return [cell for cell in found if cell.settings.get(_ADAPTIVE) is None]


def of_task(found: Sequence[Cell], task: str) -> list[Cell]:
    """The cells of a task, in the setup of the page."""
    places = (task, ASKED[task].setup)
    return [cell for cell in found if (cell.place.task, cell.place.setup) == places]


def methods(own: Sequence[Cell]) -> list[str]:
    """Names with fixed budgets: ours in the order of the policy table, then others."""
    there = {cell.name for cell in fixed(own)}
    return [
        *(name for name in available_policies() if name in there),
        *sorted(there - {*available_policies()}),
    ]


def columns(own: Sequence[Cell]) -> list[tuple[int, int]]:
    """Lengths and budgets of the fixed cells, in order; all budgets if there are none."""
    found = {(c.place.length, c.budget) for c in fixed(own) if c.budget is not None}
    lengths = {cell.place.length for cell in own}
    for length in lengths - {length for length, _ in found}:
        found |= {(length, budget) for budget in BUDGETS if budget < length}
    return sorted(found)


def column_marks(heads: Sequence[tuple[int, int]], first: str) -> list[str]:
    """The budgets; first: formats the first one of each length, with `length` and `budget`."""
    begun = dict(reversed(heads))  # the first budget of each length
    return [
        (first if begun[length] == budget else "{budget:,}").format(length=length, budget=budget)
        for length, budget in heads
    ]


def gain_over_fixed(cell: Cell, found: Sequence[Cell]) -> float | None:
    """Score minus that of the policy's fixed budgets at the same bytes per step.

    Scores are interpolated linearly over the logarithm of bytes, and constant above the largest
    budget. None below the smallest budget, and without data.
    """
    known = sorted((math.log(read), score) for read, score in _curve(cell, found))
    if not known or cell.score is None or not cell.bytes_per_step:
        return None
    at = math.log(cell.bytes_per_step)
    below = [point for point in known if point[0] <= at]
    above = [point for point in known if point[0] > at]
    if not below:
        return None
    (x, y) = below[-1]
    if above:
        y += (at - x) / (above[0][0] - x) * (above[0][1] - y)
    return cell.score - y


def cheapest_as_right(cell: Cell, found: Sequence[Cell]) -> float | None:
    """Bytes per step of the policy's smallest fixed budget with at least this score, or None."""
    if cell.score is None:
        return None
    return min((read for read, score in _curve(cell, found) if score >= cell.score), default=None)


def _curve(cell: Cell, found: Sequence[Cell]) -> list[tuple[float, float]]:
    """Bytes per step and score of the policy's fixed budgets at the task and length of a cell."""
    return [
        (other.bytes_per_step, other.score)
        for other in fixed(found)
        if (other.place, other.policy) == (cell.place, cell.policy)
        and other.bytes_per_step
        and other.score is not None
    ]

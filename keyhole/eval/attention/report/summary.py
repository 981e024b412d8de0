"""What stored lines say: means over sparse layers and steps, with intervals over texts.

Each text is one observation; its steps and layers are not independent, and are averaged first.
A policy is compared with its controls text by text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keyhole.eval.attention.cells import LOSS, METHOD, OVERLAP, RANDOM, TRAINED
from keyhole.eval.results.line_file import Line

_Z = statistics.NormalDist().inv_cdf(0.975)
#: A policy that reads so much more than its control cannot be compared with it.
_MORE = 1.02


class Estimate(NamedTuple):
    """A mean over texts, and half the width of its 95 % interval; None with a single text."""

    mean: float
    half: float | None

    @property
    def low(self) -> float:
        """The lower end; minus infinity with a single text."""
        return -math.inf if self.half is None else self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end; infinity with a single text."""
        return math.inf if self.half is None else self.mean + self.half


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """A policy at one length and budget on one kind of weights, over its sparse layers.

    mass, error: of the policy (METHOD) and of each control. read: tokens of the policy, and of its
    controls. gain: the share of its recent control's error that it does without; None where it has
    no control, or reads more. way: how far it comes from its recent control to the oracle, 1 being
    there; None where the oracle is no better. repeats: share of a selection that is selected again
    in the next step.
    """

    line: Line
    mass: dict[str, Estimate]
    error: dict[str, Estimate]
    read: dict[str, float]
    gain: Estimate | None
    way: Estimate | None
    repeats: float | None

    @property
    def name(self) -> str:
        """As it was asked for."""
        return str(self.line["method"])

    @property
    def dense_layers(self) -> list[int]:
        """Layers that read everything."""
        return list(self.line["dense_layers"])

    @property
    def reads_more(self) -> bool:
        """Whether it reads more than its controls do."""
        return "recent" in self.read and self.read[METHOD] > _MORE * self.read["recent"]


@dataclass(frozen=True, kw_only=True)
class AttentionSetting:
    """What is compared with each other: all but the method. Rows by method and kind of weights.

    overlaps: the line of the top lists, by kind of weights.
    """

    model: str
    texts: str
    length: int
    budget: int | None
    terms: str
    rows: dict[tuple[str, str], SummaryRow] = field(default_factory=dict)
    overlaps: dict[str, Line] = field(default_factory=dict)

    @property
    def methods(self) -> list[str]:
        """Methods in their order."""
        return list(dict.fromkeys(name for name, _ in self.rows))

    def row(self, method: str, weights: str = TRAINED) -> SummaryRow | None:
        """The row of a method, if it was measured."""
        return self.rows.get((method, weights))


def places(lines: Iterable[Line]) -> list[AttentionSetting]:
    """The lines, sorted into what is compared; of two that measure the same the last one counts.

    Overlaps stand in every place of their length and budget.
    """
    known = list(lines)
    found: dict[tuple[Any, ...], AttentionSetting] = {}
    for line in known:
        if line["measured"] == LOSS:
            key = _key(line)
            place = found.setdefault(
                (*key, line["terms"]),
                AttentionSetting(**dict(zip(_KEY, key, strict=True)), terms=line["terms"]),
            )
            place.rows[line["method"], line["weights"]] = row(line)
    for line in known:
        if line["measured"] == OVERLAP:
            for known_by, place in found.items():
                if known_by[:-1] == _key(line):
                    place.overlaps[line["weights"]] = line
    return list(found.values())


def row(line: Line) -> SummaryRow:
    """The means of one line over the layers that its policy does not read densely."""
    sparse = [i for i, layer in enumerate(line["layers"]) if layer not in line["dense_layers"]]
    losses = line["losses"]

    def texts(who: str, what: str) -> list[float]:
        rows = losses[who][what]
        return [statistics.fmean(one[i] for i in sparse) for one in rows]

    if not sparse:
        nothing = {METHOD: Estimate(0.0, 0.0)}
        everything = {METHOD: Estimate(1.0, 0.0)}
        return SummaryRow(
            line=line,
            mass=everything,
            error=nothing,
            read={},
            gain=None,
            way=None,
            repeats=None,
        )
    error = {who: texts(who, "error") for who in losses}
    read = {who: statistics.fmean(texts(who, "read")) for who in losses}
    comparable = "recent" in error and read[METHOD] <= _MORE * read["recent"]
    again = [one[0] for one in line["repeats"] if one[0] is not None]
    return SummaryRow(
        line=line,
        mass={who: estimate(texts(who, "mass")) for who in losses},
        error={who: estimate(values) for who, values in error.items()},
        read=read,
        gain=_gain(error) if comparable else None,
        way=_way(error) if comparable else None,
        repeats=statistics.fmean(again) if again else None,
    )


def estimate(values: Sequence[float]) -> Estimate:
    """The mean and Student's 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, None)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, student(len(values) - 1) * error)


def student(freedom: int) -> float:
    """The 0.975 quantile of Student's t distribution.

    Exact for 1 and 2 degrees of freedom, else the expansion by Abramowitz and Stegun, 26.7.5, which
    is within 0.2 %.
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def curve(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean over texts of values that stand below each other, None where no text has one."""
    found: list[float | None] = []
    for column in zip(*rows, strict=True):
        there = [value for value in column if value is not None]
        found.append(statistics.fmean(there) if there else None)
    return found


_KEY = ("model", "texts", "length", "budget")


def _key(line: Line) -> tuple[Any, ...]:
    return tuple(line[name] for name in _KEY)


def _gain(error: dict[str, list[float]]) -> Estimate:
    pairs = zip(error[METHOD], error["recent"], strict=True)
    return estimate([1 - own / recent for own, recent in pairs])


def _way(error: dict[str, list[float]]) -> Estimate | None:
    rows = list(zip(error[METHOD], error["recent"], error["oracle"], strict=True))
    if any(recent <= best for _, recent, best in rows):
        return None
    return estimate([(recent - own) / (recent - best) for own, recent, best in rows])


__all__ = ["RANDOM", "TRAINED", "Estimate", "Place", "Row", "curve", "estimate", "places", "row"]

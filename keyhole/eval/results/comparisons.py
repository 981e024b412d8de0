"""Each method beside its own controls and full attention, on the same samples.

A gain over the recent control is what a method's selection is worth; the distance to the oracle is
what a better selection could still win. Where the recent control is within 5 points of full
attention, selecting is worth nothing there, and no method can be told from another: such a place
enters no ranking.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keyhole.eval.methods import FULL
from keyhole.eval.results import paired
from keyhole.eval.results.conditions import CONTROLS
from keyhole.eval.results.paired import Gain

Line = dict[str, Any]

TELLING = 0.05
"""Full attention less the recent control must be more than this, for methods to be compared."""
RECENT, RANDOM, ORACLE = "recent", "random", "oracle"
#: What lines that are measured on the same samples have in common.
_SAME = ("model", "fingerprint", "task", "task_settings", "length", "setup")
#: Points are sums of floats: 5 points are 5 points.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A method's line beside others; shares and points from 0 to 1.

    samples: of all of them, the first ones that every line has. interval: Wilson's, None unless
    each sample is right or wrong. full: mean score of full attention. controls, lines, gains: mean
    score and line of each control that was measured, and the gain over it; not of one that is the
    method itself.
    """

    samples: int
    score: float
    interval: tuple[float, float] | None
    full: float | None
    controls: Mapping[str, float]
    gains: Mapping[str, Gain]
    lines: Mapping[str, Line] = field(default_factory=dict, repr=False)

    @property
    def gain(self) -> Gain | None:
        """Over the recent control."""
        return self.gains.get(RECENT)

    @property
    def distance(self) -> float | None:
        """How far below the oracle the score is."""
        oracle = self.controls.get(ORACLE)
        return None if oracle is None else oracle - self.score

    @property
    def can_tell(self) -> bool | None:
        """Whether this place tells methods apart; None where that was not measured."""
        recent = self.controls.get(RECENT)
        if self.full is None or recent is None:
            return None
        return self.full - recent > TELLING + ROUNDING

    def to_json(self) -> Line:
        """For `--json`: everything, gains by the name of the control."""
        return {
            "samples": self.samples,
            "score": self.score,
            "interval": self.interval,
            "full": self.full,
            "controls": dict(self.controls),
            "gains": {name: vars(gain) for name, gain in self.gains.items()},
            "distance": self.distance,
            "can_tell": self.can_tell,
        }


def compared(lines: Sequence[Line]) -> list[Comparison | None]:
    """For each line its comparison; None for one that names no controls, or has no scores.

    A control is looked for among the lines by its policy, its settings and what was asked; of
    several, the one with the most samples counts, and the last of these.
    """
    known: dict[str, Line] = {}
    full: dict[str, Line] = {}
    for line in sorted(lines, key=lambda line: len(_scores(line))):
        known[_key(line)] = line
        if line.get("policy") == FULL.name:
            full[_asked(line)] = line
    return [_compared(line, known, full) for line in lines]


def wilson_of(scores: object) -> tuple[float, float] | None:
    """Wilson's 95 % interval of the share of right answers; None unless each is right or wrong."""
    if not isinstance(scores, list | tuple) or not scores:
        return None
    if any(score not in (0, 1) for score in scores):
        return None
    return paired.wilson(sum(score == 1 for score in scores), len(scores))


def _compared(line: Line, known: Mapping[str, Line], full: Mapping[str, Line]) -> Comparison | None:
    named = line.get(CONTROLS)
    if not isinstance(named, dict) or not _scores(line):
        return None
    others = {
        name: known.get(_key(line | one))
        for name, one in named.items()
        if isinstance(one, dict) and _key(line | one) != _key(line)  # a method may be a control
    }
    found = {name: scores for name, one in others.items() if one and (scores := _scores(one))}
    all_read = _scores(full.get(_asked(line), {}))
    number = min(len(scores) for scores in (_scores(line), *found.values(), all_read) if scores)
    own = _scores(line)[:number]
    found = {name: scores[:number] for name, scores in found.items()}
    return Comparison(
        samples=number,
        score=_mean(own),
        interval=wilson_of(own),
        full=_mean(all_read[:number]) if all_read else None,
        controls={name: _mean(scores) for name, scores in found.items()},
        gains={name: paired.gain(own, scores) for name, scores in found.items()},
        lines={name: others[name] or {} for name in found},
    )


def _scores(line: Line) -> list[float]:
    """One for each sample; none if one of them is no number."""
    scores = line.get("scores")
    if not isinstance(scores, list) or not all(
        isinstance(one, int | float) and math.isfinite(one) for one in scores
    ):
        return []
    return scores


def _asked(line: Line) -> str:
    return json.dumps([line.get(name) for name in _SAME], sort_keys=True)


def _key(line: Line) -> str:
    return json.dumps([_asked(line), line.get("policy"), line.get("settings")], sort_keys=True)


def _mean(scores: Sequence[float]) -> float:
    return math.fsum(scores) / len(scores)

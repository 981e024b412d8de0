"""A verdict for each method, from samples that the method, its control and the reference answered.

For every budget of a method, over the samples of all places (task x length x setup):

    loss   the reference's mean score minus the method's, over all samples
    gain   the method's mean score minus its control's, over the samples of places that can tell:
           those where the control's mean is more than 5 points below the reference's

with 95 % intervals of the paired differences. Then, in this order:

    cannot tell         no place can tell, or none of the following is so
    use it              the loss is at most 2 points and the gain more than 0, by their intervals'
                        ends on the wrong side
    no better           the gain's interval holds 0 and nothing above 5 points
    loses               the loss is more than 2 points by its interval's lower end

A method is recommended with its smallest budget of which "use it" is so, and whose loss, and that
of every larger budget, is within 2 points. Going down from the largest budget and stopping at the
first failure keeps the chance of a wrong "within 2 points" at 2.5 % a method, however many budgets
there are. Otherwise the method's verdict is that of its largest budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from keyhole.eval.results.comparisons import ROUNDING, TELLING
from keyhole.eval.results.paired import gain, wilson

USE_IT, NO_BETTER, CANNOT_TELL, LOSES = "use it", "no better", "cannot tell", "loses"
VERDICTS = (USE_IT, NO_BETTER, CANNOT_TELL, LOSES)
#: Most that a method may lose to the reference, as a share of 1.
LOSS = 0.02

Budget = TypeVar("Budget")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of the same samples at one place, from 0 to 1."""

    method: Sequence[float]
    reference: Sequence[float]
    control: Sequence[float]

    @property
    def can_tell(self) -> bool:
        """Whether the control leaves something to gain here."""
        return _mean(self.reference) - _mean(self.control) > TELLING + ROUNDING


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean difference of scores and its 95 % interval, as shares of 1."""

    points: float
    low: float
    high: float
    samples: int

    @property
    def text(self) -> str:
        """In points of a hundred: 1.5 (-0.4 to 3.1)."""
        # Rounded first: a minus before 0.0 would say nothing.
        points, low, high = (round(100 * x, 1) + 0.0 for x in (self.points, self.low, self.high))
        return f"{points:.1f} ({low:.1f} to {high:.1f})"

    @property
    def reversed(self) -> Interval:
        """The same difference the other way round."""
        return Interval(points=-self.points, low=-self.high, high=-self.low, samples=self.samples)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is known of one budget. gain: None where no place can tell; telling: how many can."""

    verdict: str
    loss: Interval
    gain: Interval | None
    places: int
    telling: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Verdict(Generic[Budget]):
    """The verdict of a method. budgets: smallest first; recommended: None unless `use it`."""

    verdict: str
    why: str
    budgets: tuple[tuple[Budget, Judgement], ...]
    recommended: Budget | None


def judge(places: Sequence[Scores], reference: str, control: str) -> Judgement:
    """One budget of a method; the names are for `why`. Needs at least one place with a sample."""
    loss = difference(places).reversed
    telling = [place for place in places if place.can_tell]
    gained = None
    if telling:
        gained = _interval(
            [one for place in telling for one in place.method],
            [one for place in telling for one in place.control],
        )
    verdict, why = _verdict(loss, gained, places, reference, control)
    return Judgement(
        verdict=verdict,
        loss=loss,
        gain=gained,
        places=len(places),
        telling=len(telling),
        why=why,
    )


def difference(places: Sequence[Scores]) -> Interval:
    """The method's mean score minus the reference's."""
    return _interval(
        [one for place in places for one in place.method],
        [one for place in places for one in place.reference],
    )


def conclude(budgets: Sequence[tuple[Budget, Judgement]]) -> Verdict[Budget]:
    """The verdict of a method from its budgets, smallest first; at least one."""
    recommended = None
    for budget, one in reversed(budgets):
        if one.loss.high > LOSS:
            break
        if one.verdict == USE_IT:
            recommended = (budget, one)
    last = budgets[-1][1] if recommended is None else recommended[1]
    return Verdict(
        verdict=last.verdict,
        why=last.why,
        budgets=tuple(budgets),
        recommended=None if recommended is None else recommended[0],
    )


def words(verdict: str, reference: str, control: str) -> str:
    """A verdict for people."""
    if verdict == NO_BETTER:
        return f"no better than {control}"
    if verdict == LOSES:
        return f"loses to {reference} by more than {100 * LOSS:.0f} points"
    return verdict


def _verdict(
    loss: Interval,
    gained: Interval | None,
    places: Sequence[Scores],
    reference: str,
    control: str,
) -> tuple[str, str]:
    if gained is None:
        best = max(_mean(place.reference) for place in places)
        if best <= TELLING:
            return (
                CANNOT_TELL,
                f"{reference} itself is right in at most {100 * best:.0f} % anywhere",
            )
        return CANNOT_TELL, f"{control} is within 5 points of {reference} everywhere"
    told = f"loses {loss.text} points to {reference}, gains {gained.text} over {control}"
    if loss.high <= LOSS and gained.low > 0:
        return USE_IT, told
    if gained.low <= 0 and gained.high <= TELLING:
        return NO_BETTER, told
    if loss.low > LOSS:
        return LOSES, told
    return CANNOT_TELL, f"{told}: {loss.samples} samples are too few, or the truth is at the limit"


def _interval(scores: Sequence[float], others: Sequence[float]) -> Interval:
    """Of `scores` minus `others`, sample by sample.

    Samples that all agree do not show that others would. What n samples have not shown may still
    have the probability of Wilson's upper end for 0 of n: the interval is at least as wide.
    """
    found = gain(scores, others)
    unseen = wilson(0, found.samples)[1]
    return Interval(
        points=found.points,
        low=max(-1.0, min(found.low, found.points - unseen)),
        high=min(1.0, max(found.high, found.points + unseen)),
        samples=found.samples,
    )


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)

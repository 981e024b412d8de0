"""A verdict for each policy and reuse method, from samples that its control and the reference also
answered.

For every budget of a method, over the samples of all settings (task x length x setup):

    loss   the reference's mean score minus the method's, over all samples
    gain   the method's mean score minus its control's, over the samples of settings that can tell:
           those where the control's mean is more than 5 points below the reference's

each with the 95 % interval of the paired differences. The verdict is the first that applies:

    cannot tell         no setting can tell, or none of the following holds
    use it              the loss is at most 2 points and the gain above 0, each at the unfavourable
                        end of its interval
    no better           the gain's interval begins at 0 or below, and ends at 5 points or below
    loses               the loss is more than 2 points at its interval's lower end

A method is recommended with its smallest budget for which "use it" holds, and whose loss, like that
of every larger budget, is within 2 points. Going down from the largest budget and stopping at the
first failure keeps the probability of a wrong "within 2 points" at 2.5 % per method, regardless of
the number of budgets. Otherwise the method's verdict is that of its largest budget.

For policies, the reference is full attention and the control is recency. For reuse methods, the
score is token F1, the reference computes the whole prompt, and the control is the question without
any document: where that is as good, the documents were not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Generic, TypeVar

from keyhole.eval.comparisons import METHOD, RECENT, ROUNDING, TELLING, Gain, gain, paired, wilson
from keyhole.eval.line_file import Line
from keyhole.eval.methods import CONTROL, FULL, Method
from keyhole.eval.paper.documents import NO_DOCUMENTS

USE_IT, NO_BETTER, CANNOT_TELL, LOSES = "use it", "no better", "cannot tell", "loses"
#: The most that a method may lose to the reference; a score of 1 is 100 points.
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
        """Whether the control is so far below the reference that there is something to gain."""
        return fmean(self.reference) - fmean(self.control) > TELLING + ROUNDING


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The judgement of one budget. gain: None where no place can tell; telling: number of places
    that can.
    """

    verdict: str
    loss: Gain
    gain: Gain | None
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
    """Judges one budget of a method; the names are for `why`. Needs at least one place with a
    sample.
    """
    loss = difference(places, "reference", "method")
    telling = [place for place in places if place.can_tell]
    gained = difference(telling, "method", "control") if telling else None
    verdict, why = _verdict(loss, gained, places, reference, control)
    return Judgement(
        verdict=verdict,
        loss=loss,
        gain=gained,
        places=len(places),
        telling=len(telling),
        why=why,
    )


def difference(places: Sequence[Scores], of: str = "method", other: str = "reference") -> Gain:
    """The mean score of one field of `Scores` minus that of another, sample by sample.

    That all n samples agree does not prove that others would: an outcome that none of them has may
    still have the probability of Wilson's upper end for 0 of n. The interval is at least this wide.
    """
    scores, others = ([one for place in places for one in getattr(place, x)] for x in (of, other))
    found = gain(scores, others)
    unseen = wilson(0, found.samples)[1]
    return replace(
        found,
        low=max(-1.0, min(found.low, found.points - unseen)),
        high=min(1.0, max(found.high, found.points + unseen)),
    )


def points_text(found: Gain) -> str:
    """In percentage points: 1.5 (-0.4 to 3.1)."""
    # Rounded first, to avoid "-0.0".
    points, low, high = (round(100 * x, 1) + 0.0 for x in (found.points, found.low, found.high))
    return f"{points:.1f} ({low:.1f} to {high:.1f})"


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
    loss: Gain,
    gained: Gain | None,
    places: Sequence[Scores],
    reference: str,
    control: str,
) -> tuple[str, str]:
    if gained is None:
        best = max(fmean(place.reference) for place in places)
        if best <= TELLING:
            return (
                CANNOT_TELL,
                f"{reference} itself is right in at most {100 * best:.0f} % anywhere",
            )
        return CANNOT_TELL, f"{control} is within 5 points of {reference} everywhere"
    lost, won = points_text(loss), points_text(gained)
    summary = f"loses {lost} points to {reference}, gains {won} over {control}"
    if loss.high <= LOSS and gained.low > 0:
        return USE_IT, summary
    if gained.low <= 0 and gained.high <= TELLING:
        return NO_BETTER, summary
    if loss.low > LOSS:
        return LOSES, summary
    return (
        CANNOT_TELL,
        f"{summary}: {loss.samples} samples are too few, or the true value is at the limit",
    )


POLICY_REFERENCE, POLICY_CONTROL = "full attention", "recency"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One budget of a method at its longest measured length, with its cost there.

    text: the budget as the user wrote it. line: of the longest length, the first of its places.
    bytes_per_step, read_share: means over the places of that length.
    """

    text: str
    line: Line
    bytes_per_step: float
    read_share: float

    @property
    def tokens(self) -> int:
        """`token_budget` at the longest length."""
        return int(self.line["budget"])


@dataclass(frozen=True, kw_only=True)
class MethodVerdict:
    """A method with its verdict; found: None if it was refused everywhere, for the reasons in
    `refused`.
    """

    label: str
    found: Verdict[Tried] | None
    refused: tuple[str, ...]


def policy_verdicts(
    lines: Sequence[Line], refused: Sequence[Line], methods: Sequence[Method], page_size: int
) -> list[MethodVerdict]:
    """The verdict of each requested method with a budget, in order."""
    own: dict[tuple[str, int, int], list[dict[str, Line]]] = {}
    for group in paired(lines):
        if group is not None and group[METHOD].get(CONTROL) is None:
            line = group[METHOD]
            own.setdefault((line["method"], line["length"], line["budget"]), []).append(group)
    lengths = sorted({line["length"] for line in lines})
    labels = dict.fromkeys(method.label for method in methods if method is not FULL)
    found = []
    for label in labels:
        tried = []
        for method in (one for one in methods if one.label == label):
            of_budget: list[dict[str, Line]] = []
            for length in lengths:
                tokens = method.tokens(length, page_size)
                if tokens is not None:
                    of_budget += own.get((label, length, tokens), [])
            judged = _judged(of_budget)
            if judged is not None:
                measured = [group[METHOD] for group in of_budget]
                text = method.budget.text if method.budget else str(measured[0]["budget"])
                tried.append((_tried(text, measured), judged))
        tried.sort(key=lambda one: one[0].tokens)
        why = dict.fromkeys(one["error"] for one in refused if one["method"] == label)
        if tried or why:
            concluded = conclude(tried) if tried else None
            found.append(MethodVerdict(label=label, found=concluded, refused=tuple(why)))
    return found


def best_policy(found: Iterable[MethodVerdict]) -> MethodVerdict | None:
    """Of the recommended methods the one that reads the fewest bytes per step; None without any."""
    usable = [one for one in found if one.found is not None and one.found.recommended is not None]
    return min(usable, key=_bytes, default=None)


def _bytes(one: MethodVerdict) -> float:
    assert one.found is not None
    assert one.found.recommended is not None
    return one.found.recommended.bytes_per_step


def _judged(groups: Sequence[Mapping[str, Line]]) -> Judgement | None:
    """One budget over all its places; None where no place has both recency and full attention."""
    places = [
        Scores(
            method=group[METHOD]["scores"],
            reference=group[FULL.name]["scores"],
            control=group[RECENT]["scores"],
        )
        for group in groups
        if RECENT in group and FULL.name in group
    ]
    return judge(places, POLICY_REFERENCE, POLICY_CONTROL) if places else None


def _tried(text: str, lines: Sequence[Line]) -> Tried:
    longest = max(line["length"] for line in lines)
    there = [line for line in lines if line["length"] == longest]
    return Tried(
        text=text,
        line=there[0],
        bytes_per_step=fmean(line["bytes_per_step"] or 0.0 for line in there),
        read_share=fmean(line["read_share"] or 0.0 for line in there),
    )


RECOMPUTE, FULL_REUSE = "recompute", "reuse"
REUSE_REFERENCE, REUSE_CONTROL = "recomputing", "no documents"
_SCORE = "f1"


@dataclass(frozen=True, kw_only=True)
class ReuseResult:
    """A reuse method over all its questions: means, and the median time to the first token.

    over_plain: F1 gained over using stored documents unchanged; None for that method and the
    control. judged: None for the reference and the control.
    """

    name: str
    settings: dict[str, Any]
    questions: int
    f1: float
    exact: float
    sequence_ratio: float
    recompute_ratio: float
    ttft_ms: float
    judged: Judgement | None
    over_plain: Gain | None


def reuse_results(lines: Sequence[Line], names: Sequence[str]) -> list[ReuseResult]:
    """The result of each method that answered a question, in the order of `names`, the control
    last.
    """
    questions = _questions(lines)
    found = []
    for name in (*names, NO_DOCUMENTS):
        own = [one for one in questions if name in one[1]]
        if own:
            found.append(_result(name, own))
    return found


def best_reuse(found: Iterable[ReuseResult]) -> ReuseResult | None:
    """Of the recommended methods the one with the earliest first token; None without any."""
    usable = [one for one in found if one.judged and one.judged.verdict == USE_IT]
    return min(usable, key=lambda one: one.ttft_ms, default=None)


#: A question: task and length, and the results of all methods.
_Question = tuple[str, Mapping[str, Line]]


def _questions(lines: Sequence[Line]) -> list[_Question]:
    """Joins the lines of the same question; of two results of a method the later one counts."""
    joined: dict[str, tuple[str, dict[str, Line]]] = {}
    for line in lines:
        place = json.dumps([line["task"], line["task_settings"], line["length"]], sort_keys=True)
        known = joined.setdefault(f"{place} {line['seed']}", (place, {}))
        known[1].update(line["results"])
    return list(joined.values())


def _result(name: str, questions: Sequence[_Question]) -> ReuseResult:
    rows = [results[name] for _, results in questions]
    judged = over_plain = None
    if name not in (RECOMPUTE, NO_DOCUMENTS):
        places = _places(name, questions, RECOMPUTE)
        judged = judge(places, REUSE_REFERENCE, REUSE_CONTROL) if places else None
        beside = _places(name, questions, FULL_REUSE) if name != FULL_REUSE else []
        over_plain = difference(beside, "method", "reference") if beside else None

    def mean(field: str) -> float:
        return fmean(row[field] for row in rows)

    times = [row["ttft_ms"] for row in rows if row["ttft_ms"] is not None]
    return ReuseResult(
        name=name,
        settings=rows[-1]["settings"],
        questions=len(rows),
        f1=mean("f1"),
        exact=mean("exact"),
        sequence_ratio=mean("sequence_ratio"),
        recompute_ratio=mean("recompute_ratio"),
        ttft_ms=median(times) if times else 0.0,
        judged=judged,
        over_plain=over_plain,
    )


def _places(name: str, questions: Sequence[_Question], reference: str) -> list[Scores]:
    """Scores of the questions that all three answered, by task and length."""
    by_place: dict[str, list[tuple[float, float, float]]] = {}
    for place, results in questions:
        if all(one in results for one in (name, reference, NO_DOCUMENTS)):
            scores = [results[one][_SCORE] for one in (name, reference, NO_DOCUMENTS)]
            by_place.setdefault(place, []).append((scores[0], scores[1], scores[2]))
    return [
        Scores(method=method, reference=right, control=without)
        for method, right, without in (zip(*rows, strict=True) for rows in by_place.values())
    ]

"""The verdict of every reuse method, and what its answers cost, from the lines of questions.

The score is token F1. The reference computes the whole prompt, the control is asked without any
document: where it is as good, the documents were not needed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.eval.paper import verdict
from keyhole.eval.paper.documents import NO_DOCUMENTS
from keyhole.eval.paper.verdict import Interval, Judgement, Scores
from keyhole.eval.results.line_file import Line

REFERENCE, PLAIN = "recompute", "reuse"
REFERENCE_NAME, CONTROL_NAME = "recomputing", "no documents"
_SCORE = "f1"


@dataclass(frozen=True, kw_only=True)
class ReuseResult:
    """A reuse method over all its questions: means, of the time to the first token the median.

    over_plain: F1 gained over stored documents as they are; None for that method and the control.
    judged: None for the reference and the control.
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
    over_plain: Interval | None


def reuse_results(lines: Sequence[Line], names: Sequence[str]) -> list[ReuseResult]:
    """One for each method that answered a question, in the order of `names`, the control last."""
    questions = _questions(lines)
    found = []
    for name in (*names, NO_DOCUMENTS):
        own = [one for one in questions if name in one[1]]
        if own:
            found.append(_result(name, own))
    return found


def best(found: Iterable[ReuseResult]) -> ReuseResult | None:
    """Of the methods to use the one with the earliest first token; None if there is none."""
    usable = [one for one in found if one.judged and one.judged.verdict == verdict.USE_IT]
    return min(usable, key=lambda one: one.ttft_ms, default=None)


#: A question: task and length, and the results of all methods.
_Question = tuple[str, Mapping[str, Line]]


def _questions(lines: Sequence[Line]) -> list[_Question]:
    """Lines of the same question joined; of two results of a method the later one counts."""
    joined: dict[str, tuple[str, dict[str, Line]]] = {}
    for line in lines:
        place = json.dumps([line["task"], line["task_settings"], line["length"]], sort_keys=True)
        known = joined.setdefault(f"{place} {line['seed']}", (place, {}))
        known[1].update(line["results"])
    return list(joined.values())


def _result(name: str, questions: Sequence[_Question]) -> ReuseResult:
    rows = [results[name] for _, results in questions]
    judged = over_plain = None
    if name not in (REFERENCE, NO_DOCUMENTS):
        places = _places(name, questions, REFERENCE)
        judged = verdict.judge(places, REFERENCE_NAME, CONTROL_NAME) if places else None
        beside = _places(name, questions, PLAIN) if name != PLAIN else []
        over_plain = verdict.difference(beside) if beside else None

    def mean(field: str) -> float:
        return statistics.fmean(row[field] for row in rows)

    times = [row["ttft_ms"] for row in rows if row["ttft_ms"] is not None]
    return ReuseResult(
        name=name,
        settings=rows[-1]["settings"],
        questions=len(rows),
        f1=mean("f1"),
        exact=mean("exact"),
        sequence_ratio=mean("sequence_ratio"),
        recompute_ratio=mean("recompute_ratio"),
        ttft_ms=statistics.median(times) if times else 0.0,
        judged=judged,
        over_plain=over_plain,
    )


def _places(name: str, questions: Sequence[_Question], reference: str) -> list[Scores]:
    """By task and length the scores of the questions that all three answered."""
    by_place: dict[str, list[tuple[float, float, float]]] = {}
    for place, results in questions:
        if all(one in results for one in (name, reference, NO_DOCUMENTS)):
            scores = [results[one][_SCORE] for one in (name, reference, NO_DOCUMENTS)]
            by_place.setdefault(place, []).append((scores[0], scores[1], scores[2]))
    return [
        Scores(method=method, reference=right, control=without)
        for method, right, without in (zip(*rows, strict=True) for rows in by_place.values())
    ]

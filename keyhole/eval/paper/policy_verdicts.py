"""The verdict of every policy of an evaluation with controls, from its lines."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from keyhole.eval.methods import FULL, Method
from keyhole.eval.paper import verdict
from keyhole.eval.paper.verdict import Judgement, Scores, Verdict
from keyhole.eval.results.conditions import CONTROL, CONTROLS
from keyhole.eval.results.line_file import Line

_RECENT = "recent"
REFERENCE, CONTROL_NAME = "full attention", "recency"
_PLACE = ("fingerprint", "task", "task_settings", "length", "setup")


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One budget of a method: where it was measured longest, and what it cost there.

    text: the budget as it was asked for. line: of the longest length, the first of its places.
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
    """A method with its verdict; found: None where it was refused everywhere, for the reasons."""

    label: str
    found: Verdict[Tried] | None
    refused: tuple[str, ...]


def policy_verdicts(
    lines: Sequence[Line], refused: Sequence[Line], methods: Sequence[Method], page_size: int
) -> list[MethodVerdict]:
    """One for each method that was asked for under a budget, in their order."""
    known = {_key(line): line for line in lines}
    full = {_place(line): line for line in lines if line["policy"] == FULL.name}
    own: dict[tuple[str, int, int], list[Line]] = {}
    for line in lines:
        if line.get(CONTROL) is None and line.get(CONTROLS):
            own.setdefault((line["method"], line["length"], line["budget"]), []).append(line)
    lengths = sorted({line["length"] for line in lines})
    labels = dict.fromkeys(method.label for method in methods if method is not FULL)
    found = []
    for label in labels:
        tried = []
        for method in (one for one in methods if one.label == label):
            of_budget: list[Line] = []
            for length in lengths:
                tokens = method.tokens(length, page_size)
                if tokens is not None:
                    of_budget += own.get((label, length, tokens), [])
            judged = _judged(of_budget, known, full)
            if judged is not None:
                text = method.budget.text if method.budget else str(of_budget[0]["budget"])
                tried.append((_tried(text, of_budget), judged))
        tried.sort(key=lambda one: one[0].tokens)
        why = dict.fromkeys(one["error"] for one in refused if one["method"] == label)
        if tried or why:
            concluded = verdict.conclude(tried) if tried else None
            found.append(MethodVerdict(label=label, found=concluded, refused=tuple(why)))
    return found


def best(found: Iterable[MethodVerdict]) -> MethodVerdict | None:
    """Of the methods to use the one that reads the fewest bytes in a step; None without any."""
    usable = [one for one in found if one.found is not None and one.found.recommended is not None]
    return min(usable, key=_bytes, default=None)


def _bytes(one: MethodVerdict) -> float:
    assert one.found is not None
    assert one.found.recommended is not None
    return one.found.recommended.bytes_per_step


def _judged(
    lines: Sequence[Line], known: Mapping[str, Line], full: Mapping[str, Line]
) -> Judgement | None:
    """One budget over all its places; None where no place has both its control and full."""
    places = []
    for line in lines:
        recent, reference = known.get(_key(line | line[CONTROLS][_RECENT])), full.get(_place(line))
        if recent is None or reference is None:
            continue
        # The first samples are the same, where one line has more of them.
        number = min(len(one["scores"]) for one in (line, recent, reference))
        places.append(
            Scores(
                method=line["scores"][:number],
                reference=reference["scores"][:number],
                control=recent["scores"][:number],
            )
        )
    return verdict.judge(places, REFERENCE, CONTROL_NAME) if places else None


def _tried(text: str, lines: Sequence[Line]) -> Tried:
    longest = max(line["length"] for line in lines)
    there = [line for line in lines if line["length"] == longest]
    return Tried(
        text=text,
        line=there[0],
        bytes_per_step=statistics.fmean(line["bytes_per_step"] or 0.0 for line in there),
        read_share=statistics.fmean(line["read_share"] or 0.0 for line in there),
    )


def _place(line: Line) -> str:
    return json.dumps([line.get(name) for name in _PLACE], sort_keys=True)


def _key(line: Line) -> str:
    return json.dumps([_place(line), line["policy"], line["settings"]], sort_keys=True)

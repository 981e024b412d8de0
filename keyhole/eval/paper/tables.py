"""What was found, as tables of texts: the same for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keyhole.eval.paper import policy_verdicts, reuse_verdicts, verdict
from keyhole.eval.paper.policy_verdicts import MethodVerdict
from keyhole.eval.paper.recommend import REFUSED
from keyhole.eval.paper.reuse_verdicts import ReuseResult
from keyhole.eval.paper.suite import PaperOutcome

_NOTHING = "-"


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """Heads and rows, the first `left` columns being names; about: what a reader has to know."""

    title: str
    about: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int


def tables(outcome: PaperOutcome) -> list[PaperTable]:
    """The verdicts, what they rest on, and the documents; those with rows."""
    found = [
        verdicts(outcome.policies),
        budgets(outcome.policies),
        documents(outcome.reuses),
    ]
    return [table for table in found if table.rows]


def verdicts(policies: Sequence[MethodVerdict]) -> PaperTable:
    """A row for each policy: its verdict and the settings to use."""
    rows = []
    for one in policies:
        if one.found is None:
            rows.append([one.label, REFUSED, "; ".join(one.refused), *[_NOTHING] * 4])
            continue
        tried = one.found.recommended
        settings = [_NOTHING] * 4
        if tried is not None:
            dense = ",".join(map(str, tried.line.get("dense_layers") or ())) or "none"
            settings = [
                f"{tried.tokens:,}",
                f"{tried.line['length']:,}",
                dense,
                f"{tried.read_share:.1%}",
            ]
        rows.append([one.label, _policy_words(one.found.verdict), one.found.why, *settings])
    return PaperTable(
        title="Verdicts",
        about=(
            "A method is to be used if it is shown to lose at most 2 points to full attention, and "
            "to be better than the newest tokens alone under the same dense layers, sinks and "
            "budget. token_budget is the smallest that was tried of which both is so."
        ),
        heads=[
            "method",
            "verdict",
            "why",
            "token_budget",
            "at length",
            "dense layers",
            "keys read",
        ],
        rows=rows,
        left=3,
    )


def budgets(policies: Sequence[MethodVerdict]) -> PaperTable:
    """A row for each budget of each policy: what its verdict rests on."""
    rows = [
        [
            one.label,
            _policy_words(judged.verdict),
            tried.text,
            f"{tried.tokens:,}",
            judged.loss.text,
            _NOTHING if judged.gain is None else judged.gain.text,
            f"{judged.loss.samples:,}",
            f"{judged.telling} of {judged.places}",
        ]
        for one in policies
        if one.found is not None
        for tried, judged in one.found.budgets
    ]
    return PaperTable(
        title="Every budget",
        about=(
            "Points of a hundred, with 95 % intervals of the paired differences. The gain counts "
            "the samples of places (task, length and setup) that can tell: where recency is more "
            "than 5 points below full attention."
        ),
        heads=[
            "method",
            "verdict",
            "budget",
            "tokens",
            "loss to full",
            "gain over recency",
            "samples",
            "places that tell",
        ],
        rows=rows,
        left=2,
    )


def documents(reuses: Sequence[ReuseResult]) -> PaperTable:
    """A row for each reuse method: its verdict, scores and costs."""
    rows = []
    for one in reuses:
        judged = one.judged
        rows.append(
            [
                one.name,
                _NOTHING if judged is None else _reuse_words(judged.verdict),
                f"{100 * one.f1:.1f}",
                f"{100 * one.exact:.1f}",
                _NOTHING if judged is None else judged.loss.text,
                _NOTHING if one.over_plain is None else one.over_plain.text,
                f"{one.sequence_ratio:.1%}",
                f"{one.recompute_ratio:.1%}",
                f"{one.ttft_ms:.0f} ms",
                f"{one.questions:,}",
            ]
        )
    return PaperTable(
        title="Stored documents",
        about=(
            "Token F1 and exact match in percent; loss and gain are of F1, in points with 95 % "
            "intervals of the paired differences. `recompute` is the reference; `no_documents` is "
            "asked the question alone, and a place tells only where that is more than 5 points "
            "below recomputing."
        ),
        heads=[
            "method",
            "verdict",
            "F1",
            "exact match",
            "loss to recomputing",
            "gain over reuse",
            "tokens kept",
            "computed again",
            "first token",
            "questions",
        ],
        rows=rows,
        left=2,
    )


def _policy_words(found: str) -> str:
    return verdict.words(found, policy_verdicts.REFERENCE, policy_verdicts.CONTROL_NAME)


def _reuse_words(found: str) -> str:
    return verdict.words(found, reuse_verdicts.REFERENCE_NAME, reuse_verdicts.CONTROL_NAME)

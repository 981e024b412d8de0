"""The results of the suite `paper`: tables, the page, and the recommended settings file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keyhole.eval.comparisons import Gain
from keyhole.eval.line_file import EvalTable
from keyhole.eval.methods import FULL
from keyhole.eval.paper import verdicts
from keyhole.eval.paper.suite import PaperOutcome
from keyhole.eval.paper.verdicts import (
    POLICY_CONTROL,
    POLICY_REFERENCE,
    REUSE_CONTROL,
    REUSE_REFERENCE,
    MethodVerdict,
    ReuseResult,
    Tried,
    points_text,
    words,
)
from keyhole.eval.report import page
from keyhole.registry import SettingsFile

REFUSED = "refused"


def recommended(outcome: PaperOutcome, about: dict[str, Any], num_layers: int) -> SettingsFile:
    """Of the recommended policies the one that reads least, of the reuse methods the fastest.

    Without a recommended policy the file names full attention, and without a reuse method it names
    none. about: model, fingerprint, machine, date, versions and command.
    """
    policy = verdicts.best_policy(outcome.policies)
    reuse = verdicts.best_reuse(outcome.reuses)
    found = policy.found if policy is not None else None
    tried = found.recommended if found is not None else None
    lines = outcome.cells.lines
    measured = about | {
        "lengths": sorted({line["length"] for line in lines}),
        "tasks": list(dict.fromkeys(line["task"] for line in lines)),
        "setups": list(dict.fromkeys(line["setup"] for line in lines)),
        "samples": max((line["samples"] for line in lines), default=0),
        "verdict": "no method to use" if found is None else found.verdict,
        "why": "" if found is None else found.why,
        "length": None if tried is None else tried.line["length"],
        "verdicts": {one.label: verdict_fields(one) for one in outcome.policies},
        "reuse_verdicts": {
            one.name: {"verdict": one.judged.verdict, "why": one.judged.why}
            for one in outcome.reuses
            if one.judged is not None
        },
    }
    return SettingsFile(
        policy=FULL.name if tried is None else tried.line["policy"],
        settings={} if tried is None else tried.line["settings"],
        reuse=None if reuse is None else reuse.name,
        reuse_settings={} if reuse is None else reuse.settings,
        num_layers=num_layers,
        measured=measured,
    )


def verdict_fields(one: MethodVerdict) -> dict[str, Any]:
    """A policy's verdict, for the file."""
    if one.found is None:
        return {"verdict": REFUSED, "why": "; ".join(one.refused), "token_budget": None}
    tried = one.found.recommended
    budget = None if tried is None else tried.tokens
    return {"verdict": one.found.verdict, "why": one.found.why, "token_budget": budget}


_NOTHING = "-"


def tables(outcome: PaperOutcome) -> list[EvalTable]:
    """The tables of verdicts, of budgets and of documents that have rows."""
    found = [
        verdict_table(outcome.policies),
        budget_table(outcome.policies),
        document_table(outcome.reuses),
    ]
    return [table for table in found if table.rows]


def verdict_table(policies: Sequence[MethodVerdict]) -> EvalTable:
    """One row per policy: its verdict and the recommended settings."""

    def recommended(text: Callable[[Tried], str]) -> Callable[[MethodVerdict], str]:
        def cell(one: MethodVerdict) -> str:
            tried = one.found.recommended if one.found else None
            return _NOTHING if tried is None else text(tried)

        return cell

    def dense(tried: Tried) -> str:
        return ",".join(map(str, tried.line.get("dense_layers") or ())) or "none"

    return EvalTable.of(
        "Verdicts",
        3,
        policies,
        {
            "method": lambda one: one.label,
            "verdict": lambda one: _policy_words(one.found.verdict) if one.found else REFUSED,
            "why": lambda one: one.found.why if one.found else "; ".join(one.refused),
            "token_budget": recommended(lambda tried: f"{tried.tokens:,}"),
            "at length": recommended(lambda tried: f"{tried.line['length']:,}"),
            "dense layers": recommended(dense),
            "keys read": recommended(lambda tried: f"{tried.read_share:.1%}"),
        },
        "A method is recommended if it is shown to lose at most 2 points to full attention and "
        "to be better than the newest tokens alone, with the same dense layers, sinks and "
        "budget. token_budget is the smallest tried budget for which both hold.",
    )


def budget_table(policies: Sequence[MethodVerdict]) -> EvalTable:
    """One row per budget of each policy: the basis of its verdict."""
    return EvalTable.of(
        "Every budget",
        2,
        [(one.label, *pair) for one in policies if one.found for pair in one.found.budgets],
        {
            "method": lambda row: row[0],
            "verdict": lambda row: _policy_words(row[2].verdict),
            "budget": lambda row: row[1].text,
            "tokens": lambda row: f"{row[1].tokens:,}",
            "loss to full": lambda row: points_text(row[2].loss),
            "gain over recency": lambda row: _points(row[2].gain),
            "samples": lambda row: f"{row[2].loss.samples:,}",
            "places that tell": lambda row: f"{row[2].telling} of {row[2].places}",
        },
        "Percentage points, with 95 % intervals of the paired differences. The gain is over "
        "the samples of places (task, length and setup) that can tell: where recency is more "
        "than 5 points below full attention.",
    )


def document_table(reuses: Sequence[ReuseResult]) -> EvalTable:
    """One row per reuse method: its verdict, scores and costs."""

    def verdict(one: ReuseResult) -> str:
        return words(one.judged.verdict, REUSE_REFERENCE, REUSE_CONTROL) if one.judged else _NOTHING

    return EvalTable.of(
        "Stored documents",
        2,
        reuses,
        {
            "method": lambda one: one.name,
            "verdict": verdict,
            "F1": lambda one: f"{100 * one.f1:.1f}",
            "exact match": lambda one: f"{100 * one.exact:.1f}",
            "loss to recomputing": lambda one: _points(one.judged.loss if one.judged else None),
            "gain over reuse": lambda one: _points(one.over_plain),
            "tokens kept": lambda one: f"{one.sequence_ratio:.1%}",
            "recomputed": lambda one: f"{one.recompute_ratio:.1%}",
            "first token": lambda one: f"{one.ttft_ms:.0f} ms",
            "questions": lambda one: f"{one.questions:,}",
        },
        "Token F1 and exact match in percent; loss and gain are of F1, in points with 95 % "
        "intervals of the paired differences. `recompute` is the reference; `no_documents` "
        "answers the question without documents, and a place can tell only if that is more "
        "than 5 points below recomputing.",
    )


def _points(found: Gain | None) -> str:
    return _NOTHING if found is None else points_text(found)


def _policy_words(found: str) -> str:
    return words(found, POLICY_REFERENCE, POLICY_CONTROL)


_TEMPLATE = "paper.html"


def write_page(outcome: PaperOutcome, settings: SettingsFile, path: str | Path) -> None:
    """Writes the page; ConfigError if it cannot be written."""
    page.save_page(render_page(outcome, settings), path)


def render_page(outcome: PaperOutcome, settings: SettingsFile) -> str:
    """The page as text."""
    parts = (
        page.environment()
        .get_template(_TEMPLATE)
        .render(
            tables=tables(outcome),
            refused=_refused(outcome),
            settings=json.dumps(dataclasses.asdict(settings), indent=2),
            policy=settings.policy,
            reuse=settings.reuse,
        )
    )
    return page.render(outcome.cells.lines, first=parts)


def _refused(outcome: PaperOutcome) -> list[str]:
    """Everything that could not be measured, once for each reason."""
    every = [*outcome.cells.refused, *outcome.questions.refused]
    return list(dict.fromkeys(f"{one['method']}: {one['error']}" for one in every))

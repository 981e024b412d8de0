"""The results of the suite `paper`: tables, the page, and the recommended settings file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    return EvalTable(
        title="Verdicts",
        about=(
            "A method is recommended if it is shown to lose at most 2 points to full attention and "
            "to be better than the newest tokens alone, with the same dense layers, sinks and "
            "budget. token_budget is the smallest tried budget for which both hold."
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


def budget_table(policies: Sequence[MethodVerdict]) -> EvalTable:
    """One row per budget of each policy: the basis of its verdict."""
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
    return EvalTable(
        title="Every budget",
        about=(
            "Percentage points, with 95 % intervals of the paired differences. The gain is over "
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


def document_table(reuses: Sequence[ReuseResult]) -> EvalTable:
    """One row per reuse method: its verdict, scores and costs."""
    rows = []
    for one in reuses:
        judged = one.judged
        rows.append(
            [
                one.name,
                _NOTHING
                if judged is None
                else words(judged.verdict, REUSE_REFERENCE, REUSE_CONTROL),
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
    return EvalTable(
        title="Stored documents",
        about=(
            "Token F1 and exact match in percent; loss and gain are of F1, in points with 95 % "
            "intervals of the paired differences. `recompute` is the reference; `no_documents` "
            "answers the question without documents, and a place can tell only if that is more "
            "than 5 points below recomputing."
        ),
        heads=[
            "method",
            "verdict",
            "F1",
            "exact match",
            "loss to recomputing",
            "gain over reuse",
            "tokens kept",
            "recomputed",
            "first token",
            "questions",
        ],
        rows=rows,
        left=2,
    )


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

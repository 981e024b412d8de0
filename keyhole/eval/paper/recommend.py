"""The settings file that an evaluation recommends, with where they come from."""

from __future__ import annotations

from typing import Any

from keyhole.eval.methods import FULL
from keyhole.eval.paper import policy_verdicts, reuse_verdicts
from keyhole.eval.paper.policy_verdicts import MethodVerdict
from keyhole.eval.paper.suite import PaperOutcome
from keyhole.registry import SettingsFile

REFUSED = "refused"


def recommended(outcome: PaperOutcome, about: dict[str, Any], num_layers: int) -> SettingsFile:
    """Of the policies to use the one that reads least, of the reuse methods the quickest.

    Where there is no policy to use the file says full attention, and where there is no reuse method
    it names none. about: model, fingerprint, machine, date, versions and command.
    """
    policy = policy_verdicts.best(outcome.policies)
    reuse = reuse_verdicts.best(outcome.reuses)
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
        "verdicts": {one.label: told(one) for one in outcome.policies},
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


def told(one: MethodVerdict) -> dict[str, Any]:
    """A policy's verdict, for a file."""
    if one.found is None:
        return {"verdict": REFUSED, "why": "; ".join(one.refused), "token_budget": None}
    tried = one.found.recommended
    budget = None if tried is None else tried.tokens
    return {"verdict": one.found.verdict, "why": one.found.why, "token_budget": budget}

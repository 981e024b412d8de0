"""The page of the suite: verdicts and settings first, then what every evaluation's page has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from keyhole.errors import ConfigError
from keyhole.eval.paper import tables
from keyhole.eval.paper.suite import PaperOutcome
from keyhole.eval.report import page
from keyhole.registry import SettingsFile

_TEMPLATE = "paper.html"


def write(outcome: PaperOutcome, settings: SettingsFile, path: str | Path) -> None:
    """Writes the page; ConfigError if it cannot be written."""
    try:
        Path(path).write_text(render(outcome, settings), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report {str(path)!r}: {error}") from error


def render(outcome: PaperOutcome, settings: SettingsFile) -> str:
    """The page as text."""
    parts = (
        page.environment()
        .get_template(_TEMPLATE)
        .render(
            tables=tables.tables(outcome),
            refused=_refused(outcome),
            settings=json.dumps(dataclasses.asdict(settings), indent=2),
            policy=settings.policy,
            reuse=settings.reuse,
        )
    )
    return page.render(outcome.cells.lines, first=parts)


def _refused(outcome: PaperOutcome) -> list[str]:
    """What could not be measured, once for each reason."""
    every = [*outcome.cells.refused, *outcome.questions.refused]
    return list(dict.fromkeys(f"{one['method']}: {one['error']}" for one in every))

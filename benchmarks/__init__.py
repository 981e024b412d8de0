"""Measurements: each appends a JSON line to `results/` with everything needed to repeat it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def results() -> Path:
    """The folder of the stored lines, in a checkout."""
    return ROOT / "benchmarks/results"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, oldest first; none if it does not exist."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.is_file() else []


def append(path: Path, line: dict[str, Any]) -> None:
    """Adds one JSON line to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")

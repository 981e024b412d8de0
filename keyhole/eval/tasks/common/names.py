"""How a task is called where several stand beside each other: `passkey:depth=0.5`, as it is typed.

Settings that a task has anyway are left out. Those of a forced text (which one, how much of it) are
told only where they differ.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from keyhole.eval.tasks import tasks
from keyhole.registry import written

#: Names and values, as text, of what is not as a task has it anyway.
Told = tuple[tuple[str, str], ...]


def told(task: str, settings: Mapping[str, Any]) -> Told:
    """The settings of a line that are neither None nor the task's defaults."""
    known = tasks().get(task)
    usual = {f.name: f.default for f in dataclasses.fields(known)} if known is not None else {}
    return tuple(
        (name, _text(value))
        for name, value in settings.items()
        if value is not None and value != usual.get(name)
    )


def task_name(task: str, settings: Iterable[tuple[str, str]]) -> str:
    """The name with these settings."""
    return written(task, settings)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, default=str)

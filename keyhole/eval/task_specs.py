"""From the text of --tasks to tasks: `passkey:depth=0.5,ruler,perplexity`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keyhole import registry
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.eval.settings import FORCED, TASKS
from keyhole.eval.tasks import RULER, TINY_FORMS, Task, make_task, tasks
from keyhole.registry import Spec

_RULER = "ruler"


def names() -> str:
    """Every task, for the help."""
    return ", ".join([*tasks(), *FORCED]) + f"; {_RULER}: all of its tasks"


def parse(text: str, *, bundled: bool) -> list[Task | str]:
    """The tasks in their order, none twice; of those over a text (`FORCED`), the name.

    bundled: tasks in plain English stand for their forms in the words of the bundled model. Raises
    UnknownNameError for a task or a setting of one that is not there.
    """
    found: list[Task | str] = []
    for spec in registry.parse(text):
        for name in RULER if spec.name == _RULER else (spec.name,):
            known = TINY_FORMS.get(name, name) if bundled else name
            task = _task(dataclasses.replace(spec, name=known))
            if task not in found:
                found.append(task)
    if not found:
        raise ConfigError(f"tasks {text!r} must be at least one, such as {TASKS}")
    return found


def answered(parsed: Sequence[Task | str], why: str) -> list[Task]:
    """The tasks, if none is over a text; else ConfigError that says why it cannot be."""
    for task in parsed:
        if isinstance(task, str):
            raise ConfigError(f"task {task} {why}")
    return [task for task in parsed if isinstance(task, Task)]


def _task(spec: Spec) -> Task | str:
    table = tasks()
    if spec.name in FORCED:
        registry.typed(spec, "task", ())
        return spec.name
    if spec.name not in table:
        raise UnknownNameError("task", spec.name, [*table, *FORCED, _RULER])
    fields = [f for f in dataclasses.fields(table[spec.name]) if "help" in f.metadata]
    return make_task(spec.name, registry.typed(spec, "task", fields))

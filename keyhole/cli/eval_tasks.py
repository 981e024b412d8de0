"""From --tasks to what `keyhole eval` runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from keyhole.cli import specs
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.evaluate.eval_settings import FORCED, TASKS, EvalSettings

if TYPE_CHECKING:
    from keyhole.cli.specs import Spec
    from keyhole.evaluate.tasks import Task
    from keyhole.evaluate.workload import Workload
    from keyhole.models.loading import Model

_RULER = "ruler"


def names() -> str:
    """Every task, for the help."""
    from keyhole.evaluate.tasks import tasks

    return ", ".join([*tasks(), *FORCED]) + f"; {_RULER}: all of its tasks"


def parse(settings: EvalSettings, *, bundled: bool) -> list[Task | str]:
    """The tasks in their order, none twice; of those over a text, the name.

    bundled: tasks in plain English stand for their forms in the words of the bundled model. Raises
    UnknownNameError for a task or a setting of one that is not there.
    """
    from keyhole.evaluate.tasks import RULER, TINY_FORMS

    found: list[Task | str] = []
    for spec in specs.parse(settings.tasks):
        for name in RULER if spec.name == _RULER else (spec.name,):
            known = TINY_FORMS.get(name, name) if bundled else name
            task = _task(dataclasses.replace(spec, name=known))
            if isinstance(task, str) and settings.text is None and not bundled:
                raise ConfigError(f"task {task} needs a text of your own: --text FILE")
            if task not in found:
                found.append(task)
    if not found:
        raise ConfigError(f"tasks {settings.tasks!r} must be at least one, such as {TASKS}")
    return found


def workloads(parsed: list[Task | str], settings: EvalSettings, model: Model) -> list[Workload]:
    """What they are for a model. ConfigError for one without a tokenizer, and for a bad --text."""
    from keyhole.evaluate.attention_recall import AttentionRecall
    from keyhole.evaluate.forced import Perplexity, Text
    from keyhole.evaluate.tiny_text import TinyText
    from keyhole.evaluate.workload import Answered

    forced = {cls.name: cls for cls in (Perplexity, AttentionRecall)}
    text = TinyText(model) if settings.text is None else Text(settings.text, model)
    return [
        forced[task](text) if isinstance(task, str) else Answered(task, model) for task in parsed
    ]


def _task(spec: Spec) -> Task | str:
    from keyhole.evaluate.tasks import make_task, tasks

    table = tasks()
    if spec.name in FORCED:
        specs.typed(spec, "task", ())
        return spec.name
    if spec.name not in table:
        raise UnknownNameError("task", spec.name, [*table, *FORCED, _RULER])
    fields = [f for f in dataclasses.fields(table[spec.name]) if "help" in f.metadata]
    return make_task(spec.name, specs.typed(spec, "task", fields))

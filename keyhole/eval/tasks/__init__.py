"""The table of tasks, all made from seeds without downloads, and their names.

In plain English: RULER's thirteen, key-value retrieval, a passkey, long derivations and questions
over several documents. In the vocabulary of the bundled model, named `tiny_...`: its own tasks, a
needle at a chosen depth, and documents. `TINY_FORMS` maps the former to the latter.

    task = make_task("passkey", {"depth": 0.5})
    sample = task.make(4096, seed=0, count=token_counter(tokenizer))
    task.score(sample, "The passkey is 12345.")

`parse` reads the text of --tasks: `passkey:depth=0.5,ruler,perplexity`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from keyhole import registry
from keyhole.config import require_known
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.eval.settings import FORCED, TASKS
from keyhole.eval.tasks.aggregation import CWE, FWE
from keyhole.eval.tasks.base import PLAIN, TINY, CountTokens, Sample, Task, token_counter
from keyhole.eval.tasks.bundled_model import TINY_DOCUMENTS, TINY_ITEMS, TINY_NEEDLES
from keyhole.eval.tasks.question_answering import MULTI_DOCUMENT, QA
from keyhole.eval.tasks.retrieval import KEY_VALUE, NIAH, PASSKEY
from keyhole.eval.tasks.tracing import DERIVATIONS, VT
from keyhole.registry import Spec

_RULER = (*NIAH, VT, CWE, FWE, *QA)
_OTHERS = (KEY_VALUE, PASSKEY, *DERIVATIONS, *MULTI_DOCUMENT)
_TINY = (*TINY_ITEMS, *TINY_NEEDLES, *TINY_DOCUMENTS)

RULER: tuple[str, ...] = tuple(task.name for task in _RULER)
"""The thirteen tasks whose mean score is RULER's score."""

TINY_FORMS: dict[str, str] = {
    "niah_single_1": "tiny_passkey",
    "niah_single_2": "tiny_passkey",
    "niah_single_3": "tiny_passkey",
    "niah_multikey_1": "tiny_needle",
    "niah_multikey_2": "tiny_multikey",
    "niah_multikey_3": "tiny_multikey",
    "niah_multivalue": "tiny_multivalue",
    "niah_multiquery": "tiny_multiquery",
    "vt": "tiny_vartrack",
    "cwe": "tiny_majority",
    "fwe": "tiny_majority",
    "qa_1": "tiny_docs1",
    "qa_2": "tiny_docs2",
    "key_value": "tiny_multikey",
    "passkey": "tiny_passkey",
    "walk": "tiny_walk",
    "derive": "tiny_derive",
    "multi_document_1": "tiny_documents_one",
    "multi_document_2": "tiny_documents_two_hop",
}
"""A task in plain English -> its form in the vocabulary of the bundled model.

Tasks that differ only in the kind of words (numbers, UUIDs) have the same form: RULER's thirteen
tasks have nine forms, so a mean over thirteen would count some twice. `tiny_multivalue` asks for
four attributes of one entity instead of four values of one key, and `tiny_vartrack` for a chain
from its name to its value instead of the reverse. No task has the form `tiny_count`, because the
bundled model cannot count.
"""


def tasks() -> dict[str, Task]:
    """Every task by name, with its default settings."""
    return {task.name: task for task in (*_RULER, *_OTHERS, *_TINY)}


def make_task(name: str, settings: Mapping[str, Any] | None = None) -> Task:
    """The task of this name, with changed settings.

    UnknownNameError for an unknown name or setting; ConfigError for an invalid value.
    """
    table = tasks()
    require_known("task", name, table)
    task = table[name]
    for one in settings or {}:
        require_known(f"setting of task {name}", one, task.settings)
    return dataclasses.replace(task, **(settings or {}))


_RULER_NAME = "ruler"


def names() -> str:
    """All tasks, for the help."""
    return ", ".join([*tasks(), *FORCED]) + f"; {_RULER_NAME}: all of its tasks"


def parse(text: str, *, bundled: bool) -> list[Task | str]:
    """The tasks in order, each once; for the teacher-forced ones (`FORCED`), the name.

    bundled: replaces tasks in plain English by their forms in the vocabulary of the bundled model.
    Raises UnknownNameError for an unknown task or setting.
    """
    found: list[Task | str] = []
    for spec in registry.parse(text):
        for name in RULER if spec.name == _RULER_NAME else (spec.name,):
            known = TINY_FORMS.get(name, name) if bundled else name
            task = _task(dataclasses.replace(spec, name=known))
            if task not in found:
                found.append(task)
    if not found:
        raise ConfigError(f"tasks {text!r} must be at least one, such as {TASKS}")
    return found


def answered(parsed: Sequence[Task | str], why: str) -> list[Task]:
    """The tasks, if none is teacher-forced; otherwise ConfigError, with the reason."""
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
        raise UnknownNameError("task", spec.name, [*table, *FORCED, _RULER_NAME])
    task = table[spec.name]
    fields = [field for field in dataclasses.fields(task) if field.name in task.settings]
    return make_task(spec.name, registry.typed(spec, "task", fields))


#: Names and values, as text, of settings that differ from their defaults.
ChangedSettings = tuple[tuple[str, str], ...]


def changed_settings(task: str, settings: Mapping[str, Any]) -> ChangedSettings:
    """The settings of a line that are neither None nor the task's defaults."""
    known = tasks().get(task)
    usual = {f.name: f.default for f in dataclasses.fields(known)} if known is not None else {}
    return tuple(
        (name, _text(value))
        for name, value in settings.items()
        if value is not None and value != usual.get(name)
    )


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, default=str)

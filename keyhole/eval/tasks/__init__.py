"""The table of tasks: what a method is asked, made from seeds, without any download.

In plain English, for models that read it: RULER's thirteen, retrieval of a key's value, a passkey,
long derivations and questions over several documents. In the words of the bundled model's world,
named `tiny_...`: its own tasks, a needle at a chosen depth, and documents. `TINY_FORMS` says which
of these stands in for which of the others.

    task = make_task("passkey", {"depth": 0.5})
    sample = task.make(4096, seed=0, count=token_counter(tokenizer))
    task.score(sample, "The passkey is 12345.")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from keyhole.errors import UnknownNameError
from keyhole.eval.tasks.base import PLAIN, TINY, CountTokens, Sample, Task, token_counter
from keyhole.eval.tasks.common_words import CWE
from keyhole.eval.tasks.derivation import DERIVATIONS
from keyhole.eval.tasks.frequent_words import FWE
from keyhole.eval.tasks.key_value import KEY_VALUE
from keyhole.eval.tasks.multi_document import MULTI_DOCUMENT
from keyhole.eval.tasks.niah import NIAH
from keyhole.eval.tasks.passkey import PASSKEY
from keyhole.eval.tasks.question_answering import QA
from keyhole.eval.tasks.tiny_documents import TINY_DOCUMENTS
from keyhole.eval.tasks.tiny_items import TINY_ITEMS
from keyhole.eval.tasks.tiny_needle import TINY_NEEDLES
from keyhole.eval.tasks.variable_tracking import VT

__all__ = [
    "PLAIN",
    "RULER",
    "TINY",
    "TINY_FORMS",
    "CountTokens",
    "Sample",
    "Task",
    "make_task",
    "tasks",
    "token_counter",
]

_RULER = (*NIAH, VT, CWE, FWE, *QA)
_OTHERS = (KEY_VALUE, PASSKEY, *DERIVATIONS, *MULTI_DOCUMENT)
_TINY = (*TINY_ITEMS, *TINY_NEEDLES, *TINY_DOCUMENTS)

RULER: tuple[str, ...] = tuple(task.name for task in _RULER)
"""The thirteen whose mean is RULER's score."""

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
"""A task in plain English -> the form of it that the bundled model can read.

Where the differences lie in what a word is (numbers, UUIDs), forms coincide: RULER's thirteen have
nine, so a mean over thirteen would count some twice. A word of that world is a token;
`tiny_multivalue` asks for four attributes of one entity instead of four values of one key,
`tiny_vartrack` for a chain from its name to its value instead of the reverse. `tiny_count` stands
for no task, because the bundled model cannot count.
"""


def tasks() -> dict[str, Task]:
    """Every task by name, with its default settings."""
    return {task.name: task for task in (*_RULER, *_OTHERS, *_TINY)}


def make_task(name: str, settings: Mapping[str, Any] | None = None) -> Task:
    """The task of a name with settings of it changed.

    UnknownNameError for a name or setting that is not there; ConfigError for a wrong value.
    """
    table = tasks()
    if name not in table:
        raise UnknownNameError("task", name, table)
    task = table[name]
    known = [field.name for field in dataclasses.fields(task) if "help" in field.metadata]
    for one in settings or {}:
        if one not in known:
            raise UnknownNameError(f"setting of task {name}", one, known)
    return dataclasses.replace(task, **(settings or {}))

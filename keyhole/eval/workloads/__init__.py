"""What the tasks of an evaluation are for a model."""

from __future__ import annotations

from collections.abc import Sequence

from keyhole.eval.tasks import Task
from keyhole.eval.tiny_language.text import TinyText
from keyhole.eval.workloads.attention_recall import AttentionRecall
from keyhole.eval.workloads.perplexity import Perplexity, WindowedText
from keyhole.eval.workloads.workload import Answered, Workload
from keyhole.models.loading import Model


def workloads(
    parsed: Sequence[Task | str], text: str | None, model: Model, first_seed: int = 0
) -> list[Workload]:
    """A workload for each task of `task_specs.parse`; text: the file of those over one.

    first_seed: of samples that are made from seeds. Without a text, the tasks over one take
    derivations in the words of the bundled model. ConfigError for a model without a tokenizer, and
    for a text that cannot be read.
    """
    forced = {cls.name: cls for cls in (Perplexity, AttentionRecall)}
    windows = TinyText(model) if text is None else WindowedText(text, model)
    return [
        forced[task](windows) if isinstance(task, str) else Answered(task, model, first_seed)
        for task in parsed
    ]

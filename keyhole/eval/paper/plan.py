"""What the suite measures on a model: lengths, tasks, policies, and questions over documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from keyhole.errors import ConfigError
from keyhole.eval.run import EvalGrid, Group
from keyhole.eval.tasks import CountTokens, Task, token_counter
from keyhole.eval.workloads.workload import Workload
from keyhole.models.loading import Model
from keyhole.policies import available_policies

#: RULER's shortest length; each further one is twice as long.
_SHORTEST = 4096
#: Policies that are the recent control themselves.
_RECENCY = ("sliding_window", "streaming_llm")
#: A task whose texts cannot grow is not asked at lengths of which it fills less than this share.
_FILLED = 0.5


@dataclass(frozen=True, kw_only=True)
class PaperGrid(EvalGrid):
    """Cells of the tasks at the lengths that each of them can fill."""

    lengths_of: Mapping[Workload, tuple[int, ...]] = field(default_factory=dict)

    def groups(self) -> Iterator[Group]:
        """As any grid's, without lengths that are too short or too long for a task."""
        for workload in self.workloads:
            own = dataclasses.replace(
                self, workloads=(workload,), lengths=self.lengths_of[workload]
            )
            yield from super(PaperGrid, own).groups()


def default_lengths(model: Model) -> tuple[int, ...]:
    """4,096 tokens and each double of it that the model takes; of a shorter model all it takes."""
    found, length = [], _SHORTEST
    while length <= model.max_length:
        found.append(length)
        length *= 2
    return tuple(found) or (model.max_length,)


def default_policies(model: Model) -> str:
    """Every method that this model can have, recency aside, as `--policies` takes them."""
    return ",".join(
        name
        for name, cls in available_policies().items()
        if not (cls.dense or name in _RECENCY or (cls.wants_head and model.head is None))
    )


def lengths_of(
    workloads: Sequence[Workload], lengths: Sequence[int], setup: str
) -> dict[Workload, tuple[int, ...]]:
    """By task the lengths that it can fill; ConfigError if there is no task with such a length."""
    found = {one: tuple(n for n in lengths if _fills(one, n, setup)) for one in workloads}
    if not any(found.values()):
        raise ConfigError(
            f"no task has texts of {', '.join(map(str, lengths))} tokens; name others"
        )
    return found


def document_places(
    tasks: Sequence[Task], lengths: Sequence[int], model: Model
) -> list[tuple[Task, int]]:
    """Every task at every length that is long enough for its documents."""
    count = token_counter(model.tokenizer)
    return [(task, n) for task in tasks for n in lengths if _fits(task, n, count)]


def _fits(task: Task, length: int, count: CountTokens) -> bool:
    try:
        task.make(length, 0, count)
    except ConfigError:  # too short for it
        return False
    return True


def _fills(workload: Workload, length: int, setup: str) -> bool:
    try:
        workload.available(length, 1)
    except ConfigError:  # too short for it
        return False
    request = workload.shown(length, setup).request
    return len(request.prompt) + len(request.given) + request.max_tokens >= _FILLED * length

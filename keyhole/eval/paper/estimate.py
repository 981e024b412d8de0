"""How long an evaluation will take at most, from a short probe, before it begins.

Every answer is taken to run to its longest, and every policy's step to take as long as full
attention's. Methods over stored documents are taken to compute the whole prompt, as `recompute`
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keyhole.eval.paper.speed import Speed
from keyhole.eval.run import Group
from keyhole.eval.tasks import Sample
from keyhole.eval.workloads.generation import Request


@dataclass(frozen=True, kw_only=True)
class PartEstimate:
    """A part of the evaluation: cells, or questions, those stored among them, and the seconds of
    the rest.
    """

    name: str
    unit: str
    number: int
    stored: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Samples of one task and length. missing: policies that are still to answer them."""

    request: Request
    samples: int
    missing: int

    @classmethod
    def of(cls, group: Group, missing: int) -> Answers:
        """Of a group's first sample: the others are about as long."""
        request = group.workload.shown(group.length, group.setup).request
        return cls(request=request, samples=group.samples, missing=missing)

    def seconds(self, speed: Speed, shared_tokens: float) -> float:
        """shared_tokens: of prompts that are computed once for all policies, at most so many."""
        if not self.missing:
            return 0.0
        one = self.request
        tokens = len(one.prompt)
        kept = min(1.0, shared_tokens / (tokens * self.samples))
        prefills = kept + (1 - kept) * self.missing
        written = len(one.given) + one.max_tokens
        return prefills * self.samples * speed.prefill(tokens) + self.missing * speed.decode(
            tokens, written, self.samples
        )


def question_seconds(speed: Speed, sample: Sample, methods: int) -> float:
    """One question over documents that are stored first, under so many methods, one at a time."""
    documents = max(1, len(sample.documents))
    stored = documents * speed.prefill(sample.prompt_tokens / documents)
    answered = speed.prefill(sample.prompt_tokens) + sample.max_new_tokens * speed.step.at(
        sample.prompt_tokens
    )
    return stored + methods * answered


def text(parts: Sequence[PartEstimate]) -> str:
    """For people, in a line: what there is to do, what is stored, and how long the rest takes."""
    told = [
        f"{part.name}: {part.number:,} {part.unit}{'s' * (part.number != 1)}, "
        f"{part.stored:,} stored"
        + (f", the rest at most {duration(part.seconds)}" if part.stored < part.number else "")
        for part in parts
        if part.number
    ]
    left = sum(part.seconds for part in parts)
    return f"{'; '.join(told)}. Altogether at most about {duration(left)}."


def duration(seconds: float) -> str:
    """For people: 40 s, 12 min, 3.5 h, 2.1 days."""
    for limit, size, unit in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"

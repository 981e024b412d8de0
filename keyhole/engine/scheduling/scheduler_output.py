"""`SchedulerOutput`: what one step computes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from keyhole.engine.request import RequestPolicy
from keyhole.engine.sequence import Sequence

#: Pages to copy, in this order: from the pages of a first list to those of a second.
PageCopies = list[tuple[list[int], list[int]]]


@dataclass
class SchedulerOutput:
    """One step: sequences that decode one token, and (sequence, tokens) of prompts.

    admitted: sequences that run from this step on. copies: pages to copy before the model runs, in
    this order, from the first list to the second; each has a reference to the first, to be released
    then. filling: the sequence whose pages are filled in the rest of the step, with what is known
    of its prompt or with stored documents. refused: waiting sequences that ended with an error.
    drafts: the tokens proposed to follow the newest token of a decoding sequence, at least one
    each, which the step computes too.
    """

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    copies: PageCopies = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    filling: Sequence | None = None
    refused: list[Sequence] = field(default_factory=list)
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Sequence]:
        """The sequence of each decoded token: a decoding sequence, once more per proposed token."""
        if not self.drafts:
            return self.decodes
        return [s for s in self.decodes for _ in range(1 + len(self.drafts.get(s, ())))]

    @property
    def runs(self) -> bool:
        """Whether the model runs in this step."""
        return bool(self.decodes or self.chunks)

    def by_policy(self) -> dict[RequestPolicy, SchedulerOutput]:
        """The step in parts, one for each policy that its sequences run under."""
        parts: dict[RequestPolicy, SchedulerOutput] = defaultdict(SchedulerOutput)
        for sequence in self.decodes:
            part = parts[sequence.under]
            part.decodes.append(sequence)
            if sequence in self.drafts:
                part.drafts[sequence] = self.drafts[sequence]
        for sequence, count in self.chunks:
            parts[sequence.under].chunks.append((sequence, count))
        return parts

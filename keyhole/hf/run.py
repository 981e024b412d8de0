"""What a `sparse` block gives: the policy in use, and what it read."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from keyhole.engine.sequence import Counters
from keyhole.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class SparseStats:
    """What all calls inside a `sparse` block cost together. None: no decode step ran.

    prompt_tokens: computed exactly. decoded_tokens: computed under the policy, rows that wait for
    longer ones included. step_ms: median of the decode steps. The others as in `Stats`.
    """

    prompt_tokens: int
    decoded_tokens: int
    step_ms: float | None
    attended_fraction: float | None
    kv_bytes_read: int
    other_bytes_read: int


@dataclass
class SparseRun:
    """What `sparse` gives: the policy in use, every "auto" settled, and what it read so far."""

    policy: Policy
    counters: Counters = field(default_factory=Counters)
    prompt_tokens: int = 0
    step_ms: list[float] = field(default_factory=list)

    @property
    def stats(self) -> SparseStats:
        """The counters so far."""
        steps = self.counters.steps
        return SparseStats(
            prompt_tokens=self.prompt_tokens,
            decoded_tokens=steps,
            step_ms=statistics.median(self.step_ms) if steps else None,
            attended_fraction=self.counters.attended_fraction / steps if steps else None,
            kv_bytes_read=round(self.counters.kv_bytes),
            other_bytes_read=round(self.counters.other_bytes),
        )

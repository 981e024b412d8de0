"""The learning rate, in tokens: constant, then a long straight line down to zero.

The line is what makes a model exact (the constant part alone never gets there), and because it
starts from a constant rate, a run can be ended well from any snapshot: `cooled_down` puts the
line there.
"""

from dataclasses import dataclass

_WARM_UP = 100_000
_DECAY_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A factor on the learning rate for every number of tokens seen."""

    total: int
    """Tokens after which the rate is zero and the training ends."""
    decay_from: int
    """Where the line starts."""
    peak: float = 1.0
    """The factor before it, and at its start."""

    def factor(self, tokens: int) -> float:
        """Give the factor after `tokens` tokens."""
        line = (self.total - tokens) / max(1, self.total - self.decay_from)
        return self.peak * max(0.0, min(1.0, line)) * min(1.0, (tokens + 1) / _WARM_UP)

    def cooled_down(self, tokens: int, more: int) -> "Schedule":
        """Decay from here to zero within `more` tokens."""
        return Schedule(total=tokens + more, decay_from=tokens, peak=self.factor(tokens))

    def stretched(self, tokens: int, total: int) -> "Schedule":
        """End at another total, without a jump where the line has already begun."""
        if tokens <= self.decay_from:
            return planned(total)
        return self.cooled_down(tokens, total - tokens)


def planned(total: int) -> Schedule:
    """Give the schedule of a whole run of `total` tokens."""
    return Schedule(total=total, decay_from=round(total * (1 - _DECAY_SHARE)))

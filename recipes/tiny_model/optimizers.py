"""Muon for the matrices, AdamW for the embedding and the norms, and their learning rate.

A model that is trained already may get AdamW for everything, at a smaller rate. The rate is
constant, then decays linearly to zero in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WARM_UP = 100_000
_DECAY_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A factor on the learning rate, by the number of tokens seen."""

    total: int
    """Tokens after which the rate is zero and the training ends."""
    decay_from: int
    """Where the line starts."""
    peak: float = 1.0
    """The factor before it, and at its start."""

    def factor(self, tokens: int) -> float:
        """Return the factor after `tokens` tokens."""
        line = (self.total - tokens) / max(1, self.total - self.decay_from)
        return self.peak * max(0.0, min(1.0, line)) * min(1.0, (tokens + 1) / _WARM_UP)

    def cooled_down(self, tokens: int, more: int) -> Schedule:
        """Decay from here to zero within `more` tokens."""
        return Schedule(total=tokens + more, decay_from=tokens, peak=self.factor(tokens))

    def stretched(self, tokens: int, total: int) -> Schedule:
        """Return the schedule with another total, without a jump if the decay has begun."""
        if tokens <= self.decay_from:
            return planned(total)
        return self.cooled_down(tokens, total - tokens)


def planned(total: int) -> Schedule:
    """Return the schedule of a whole run of `total` tokens."""
    return Schedule(total=total, decay_from=round(total * (1 - _DECAY_SHARE)))


_MUON_RATE = 0.007
_ADAMW_RATE = 1.5e-3


class Optimizers:
    """The optimizers, over the parameters of the model.

    adamw_rate: AdamW for all of them, at this rate; None: both.
    """

    def __init__(self, weights: dict[str, Tensor], adamw_rate: float | None = None) -> None:
        by_muon = {name for name in weights if adamw_rate is None and name.endswith("proj.weight")}
        self._rest = [w for name, w in weights.items() if name not in by_muon]
        rate = _ADAMW_RATE if adamw_rate is None else adamw_rate
        adamw = torch.optim.AdamW(self._rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [(adamw, rate)]
        if by_muon:
            matrices = [weights[name] for name in weights if name in by_muon]
            muon = torch.optim.Muon(matrices, lr=_MUON_RATE, weight_decay=0.0)
            self._optimizers.insert(0, (muon, _MUON_RATE))

    def step(self, factor: float) -> None:
        """Update the parameters, at `factor` times the full learning rates."""
        torch.nn.utils.clip_grad_norm_(self._rest, 1.0)
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> list[dict[str, Any]]:
        """Return everything that the next step depends on except the parameters."""
        return [optimizer.state_dict() for optimizer, _ in self._optimizers]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Resume from a `state`."""
        for (optimizer, _), own in zip(self._optimizers, state, strict=True):
            optimizer.load_state_dict(own)

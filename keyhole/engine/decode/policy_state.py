"""What is kept per sequence from step to step: a row per slot, and who has been in it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.layout import Geometry
from keyhole.engine.sequence import Sequence
from keyhole.policies.base import Policy


class SequenceState:
    """Tensors by name, [slots, ...], as the policy declared them, and lengths of prompts."""

    def __init__(self, policy: Policy, geometry: Geometry, num_slots: int, like: Tensor) -> None:
        """like: any tensor of the keys' dtype and device."""
        whole, numbers = policy.sequence_state(geometry), policy.sequence_numbers(geometry)
        assert not whole.keys() & numbers.keys(), "names of state must differ"
        self.tensors = {
            name: like.new_zeros(num_slots, *shape, dtype=torch.int32)
            for name, shape in whole.items()
        }
        self.tensors |= {n: like.new_zeros(num_slots, *shape) for n, shape in numbers.items()}
        # Whose pages stood in a row last. A sequence that leaves and comes back has a new list.
        self._lists: list[list[int] | None] = [None] * num_slots
        self._prompts = [0] * num_slots

    def enter(self, sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """Which of these sequences are here for the first time, bool [B].

        And how many tokens each had computed then, int64 [B].
        """
        fresh = [self._lists[s.slot] is not s.pages for s in sequences]
        for sequence, new in zip(sequences, fresh, strict=True):
            self._lists[sequence.slot] = sequence.pages
            if new:
                self._prompts[sequence.slot] = sequence.num_computed
        prompts = [self._prompts[s.slot] for s in sequences]
        return np.asarray(fresh, bool), np.asarray(prompts, np.int64)

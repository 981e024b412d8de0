"""What a policy keeps per sequence: a row per slot, and who has been in it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from keyhole.engine.sequence import Sequence


class SequenceState:
    """Tensors by name, int32 [slots, ...], as the policy declared them."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], num_slots: int, device: torch.device
    ) -> None:
        self.tensors = {
            name: torch.zeros(num_slots, *shape, dtype=torch.int32, device=device)
            for name, shape in shapes.items()
        }
        # Whose pages stood in a row last. A sequence that leaves and comes back has a new list.
        self._lists: list[list[int] | None] = [None] * num_slots

    def enter(self, sequences: list[Sequence]) -> np.ndarray:
        """Which of these sequences are here for the first time, bool [B]."""
        fresh = [self._lists[s.slot] is not s.pages for s in sequences]
        for sequence in sequences:
            self._lists[sequence.slot] = sequence.pages
        return np.asarray(fresh, bool)

"""The pages that a policy which evicts would still have, in a run that keeps them all.

The rules are those of `keyhole.engine.decode_inputs`: prompt pages are pinned; when a page has
been filled and the next token would make one more than the policy allows, the page that the policy
names is evicted.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.kept_tokens import RetainedPages
from keyhole.policies.base import Policy, Step


class Retained:
    """Per sequence, by its slot, the generated pages that are left."""

    def __init__(self, policy: Policy, page_size: int) -> None:
        self._policy = policy
        self._size = page_size
        self._pinned: dict[int, int] = {}
        self._limit: dict[int, int] = {}
        self._generated: dict[int, list[int]] = {}

    def view(self, step: Step) -> RetainedPages:
        """What is left for the newest tokens of a step; notes pages that they begin."""
        slots, size = step.sequences.slots.tolist(), self._size
        position = np.asarray(step.sequences.host_lengths) - 1
        for slot, place, fresh in zip(
            slots, position.tolist(), step.sequences.fresh.tolist(), strict=True
        ):
            if fresh:
                self._enter(slot, place)
            generated, newest = self._generated[slot], place // size
            if newest >= self._pinned[slot] and generated[-1:] != [newest]:
                generated.append(newest)
        rows = [[*range(self._pinned[slot]), *self._generated[slot]] for slot in slots]
        counts = np.asarray([len(row) for row in rows])
        entries = np.full((len(rows), counts.max()), -1, np.int64)
        for row, kept in zip(entries, rows, strict=True):
            row[: len(kept)] = kept
        most = max(len(self._generated[slot]) for slot in slots)
        limits = np.asarray([self._limit[slot] for slot in slots])
        gives_up = np.asarray([bool(self._generated[slot]) for slot in slots])
        due = ((position + 1) % size == 0) & (counts >= limits) & gives_up
        device = step.lengths.device
        listed = torch.from_numpy(entries).to(device)
        table = step.page_table.gather(1, listed.clamp(min=0)).masked_fill(listed < 0, 0)
        lengths = counts * size - (size - 1 - position % size)
        return RetainedPages(
            page_table=table,
            pages=torch.from_numpy(counts.astype(np.int32)).to(device),
            lengths=torch.from_numpy(lengths.astype(np.int32)).to(device),
            pinned=torch.tensor([self._pinned[slot] for slot in slots], device=device),
            goes=torch.from_numpy(due).to(device),
            entries=entries,
            most_generated=most,
            due=due,
        )

    def evict(self, step: Step, victims: Tensor) -> None:
        """Takes out the pages of sequences that are due; victims int64 [B], as of `after_step`."""
        assert step.retained is not None
        for row, slot in enumerate(step.sequences.slots.tolist()):
            if step.retained.due[row]:
                del self._generated[slot][int(victims[row])]

    def _enter(self, slot: int, position: int) -> None:
        pinned = -(-position // self._size)
        limit = self._policy.page_limit(np.asarray([pinned]), self._size)
        assert limit is not None
        self._pinned[slot], self._limit[slot] = pinned, int(limit[0])
        self._generated[slot] = []

"""Stamps of pages against plain loops."""

from __future__ import annotations

import random

import pytest
import torch

from keyhole import kernels


@pytest.mark.parametrize("seed", range(20))
def test_stamps_are_renewed_and_the_oldest_goes(seed: int) -> None:
    """Ties go to the earlier page; slots of others, and sequences that are not due, stay."""
    pick = random.Random(seed)
    slots, width = 6, 5
    rows = pick.sample(range(slots), 3)
    pinned = [pick.randint(1, 4) for _ in rows]
    counts = [pick.randint(0, width) for _ in rows]
    pages = [p + c for p, c in zip(pinned, counts, strict=True)]
    stamps = [[pick.randint(1, 3) for _ in range(width)] for _ in range(slots)]
    weights = [[pick.random() for _ in range(max(pages))] for _ in rows]
    due = [pick.random() < 0.6 and count > 0 for count in counts]
    found = torch.tensor(stamps, dtype=torch.int32)
    whose = (
        found,
        torch.tensor(rows),
        torch.tensor(pinned),
        torch.tensor(pages, dtype=torch.int32),
    )
    now = torch.tensor([9, 9, 9], dtype=torch.int32)
    some = torch.tensor(weights) if seed % 3 else None
    kernels.renew_stamps(*whose, now, some, 0.5)
    victims = kernels.drop_oldest(*whose, torch.tensor(due)).tolist()
    for i, row in enumerate(rows):
        for place in range(counts[i]):
            heavy = some is not None and float(some[i, pinned[i] + place]) > 0.5
            if heavy or place == counts[i] - 1:
                stamps[row][place] = 9
        if counts[i]:
            oldest = min(range(counts[i]), key=lambda place: (stamps[row][place], place))
            assert victims[i] == oldest
        if due[i]:
            del stamps[row][victims[i]]
    for row, left in enumerate(stamps):
        assert found[row, : len(left)].tolist() == left

"""A head's weights for the KV heads of its target, where some tokens are not there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keyhole.kernels import Selection
from keyhole.retrieval.head import group_weights
from tests.oracle import attention, float64, in_order

THERE = [[0, 1, 2, 9, 10, 14], [1, 3, 4]]
LENGTHS, SIZE, KV_HEADS, DIM = [15, 5], 4, 2, 8


@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_weights_are_over_what_is_there(heads: int, groups: int) -> None:
    """Missing pages may hold anything: page 0 is their placeholder."""
    random = torch.Generator().manual_seed(heads)
    keys = torch.randn(8, KV_HEADS, SIZE, DIM, generator=random)
    keys[0] = torch.nan
    query = torch.randn(2, heads, DIM, generator=random)
    table = [[1, 0, 2, 3], [5, 4, 0, 0]]
    indices = torch.tensor([[row + [-1] * (6 - len(row))] for row in THERE], dtype=torch.int32)
    counts = torch.tensor([[len(row)] for row in THERE], dtype=torch.int32)
    found = group_weights(
        query,
        keys,
        torch.tensor(table, dtype=torch.int32),
        torch.tensor(LENGTHS, dtype=torch.int32),
        groups,
        0.5,
        Selection(indices, counts, 1),
    )
    wanted = np.full((2, groups, 4 * SIZE), -1.0)
    for b, places in enumerate(THERE):
        row = in_order(keys, table[b], LENGTHS[b])
        _, weights = attention(float64(query[b]), row, row, [places] * KV_HEADS, scale=0.5)
        for group in range(groups):
            # Several heads meet a list, or a head serves several.
            mine = [h for h in range(heads) if h * groups // heads == group]
            mine = mine or [group * heads // groups]
            for token in places:
                wanted[b, group, token] = max(weights[h][token] for h in mine)
    assert np.abs(float64(found) - wanted).max() < 1e-6

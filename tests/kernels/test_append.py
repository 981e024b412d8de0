"""New tokens land in their places and nowhere else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from tests.effort import examples
from tests.kernels.paged import DTYPES


@given(
    size=st.sampled_from((1, 4, 16)),
    heads=st.sampled_from((1, 2, 3)),
    shared=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
@examples(150)
def test_tokens_land_in_their_slots_and_nothing_else_changes(
    size: int, heads: int, shared: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    pages, dim, value_dim = 5, 6, 4
    slots = data.draw(st.lists(st.integers(0, pages * size - 1), unique=True, max_size=9))
    key = torch.arange(len(slots) * heads * dim).view(-1, heads, dim).to(dtype)
    value = -key[..., :value_dim]
    keys = torch.full((pages, heads, size, dim), torch.nan, dtype=dtype)
    values = torch.full((pages, heads, size, value_dim), torch.nan, dtype=dtype)
    wanted_keys, wanted_values = keys.clone(), values.clone()
    for t, slot in enumerate(slots):
        for head in range(heads):
            wanted_keys[slot // size, head, slot % size] = key[t, head]
            if not shared:
                wanted_values[slot // size, head, slot % size] = value[t, head]
    kernels.append(keys, None if shared else values, key, value, torch.tensor(slots).long())
    torch.testing.assert_close(keys, wanted_keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, wanted_values, rtol=0, atol=0, equal_nan=True)

"""The tokens of a prompt chunk, each over its past, against loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.kernels.reference import attention as reference_attention
from tests.effort import examples
from tests.kernels.paged import Paged, assert_close, paged
from tests.oracle import attention, float64, visible

# torch's fused attention rounds the weights to the dtype of the values before it sums them up; a
# value is seldom larger than 4.
_LOSS = {torch.float32: 0.0, torch.bfloat16: 4 * 2.0**-9, torch.float16: 4 * 2.0**-11}


def _check(case: Paged, start: int) -> None:
    length = int(case.lengths[0])
    count = length - start
    random = torch.Generator().manual_seed(length)
    query = torch.randn(count, *case.query.shape[1:], generator=random).to(case.query.dtype)
    found = kernels.prefill(
        query,
        case.keys,
        case.values,
        case.table[0].long(),
        start,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    assert found.dtype == query.dtype
    keys, values = case.tokens(0)
    wanted = [
        attention(
            float64(row),
            keys,
            values,
            [visible(start + t + 1, case.window)] * case.num_kv_heads,
            scale=case.scale,
            softcap=case.softcap,
            sinks=case.sinks64(),
        )[0]
        for t, row in enumerate(query)
    ]
    assert_close(found, np.stack(wanted), query.dtype, loss=_LOSS[query.dtype])


@pytest.mark.slow
@given(paged(max_batch=1), st.data())
@examples(150)
def test_a_chunk_anywhere_in_the_prompt_is_causal_attention(
    case: Paged, data: st.DataObject
) -> None:
    _check(case, data.draw(st.integers(0, int(case.lengths[0]) - 1)))


@given(case=paged(max_batch=1), most=st.integers(1, 2000))
@examples(100)
def test_blocks_of_rows_give_the_same(case: Paged, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_attention, "MAX_SCORES", most)
        _check(case, 0)

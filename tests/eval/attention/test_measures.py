"""Mass kept, error of the output and overlap, against loops over numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.eval.attention import dense_run
from keyhole.kernels.reference import members

SHAPES = st.tuples(st.integers(1, 3), st.sampled_from([(2, 1), (4, 2), (6, 6)]), st.integers(1, 9))


@given(SHAPES, st.integers(0, 999), st.sampled_from(["one list", "KV heads", "query heads"]))
def test_mass_is_what_a_loop_adds_up(
    shape: tuple[int, tuple[int, int], int], seed: int, lists: str
) -> None:
    batch, (heads, kv_heads), count = shape
    generator = np.random.default_rng(seed)
    number = {"one list": 1, "KV heads": kv_heads, "query heads": heads}[lists]
    weights = generator.random((batch, heads, count)).astype(np.float32)
    tokens = generator.random((batch, number, count)) < 0.5
    found = dense_run.mass_kept(torch.tensor(weights), torch.tensor(tokens)).tolist()
    for row in range(batch):
        shares = []
        for head in range(heads):
            own = tokens[row, head * number // heads]
            kept = sum(float(w) for w, read in zip(weights[row, head], own, strict=True) if read)
            shares.append(kept / sum(map(float, weights[row, head])))
        # Shares are at most 1 and summed in float32.
        assert found[row] == pytest.approx(sum(shares) / heads, abs=1e-6)


def test_the_error_is_relative_and_over_all_heads_at_once() -> None:
    full = torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[1.0, 0.0], [0.0, 0.0]]])
    found = torch.tensor([[[3.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 2.0]]])
    assert dense_run.output_error(full, found).tolist() == pytest.approx([3 / 5, 2.0])
    assert dense_run.output_error(full, full).tolist() == [0, 0]


@given(st.integers(1, 3), st.integers(2, 20), st.integers(0, 999))
def test_overlap_counts_what_is_in_both(heads: int, count: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, count + 1))
    lists = [
        [sorted(generator.choice(count, size, False).tolist()) for _ in range(heads)]
        for _ in range(2)
    ]
    wanted, among = (members(torch.tensor([rows], dtype=torch.int32), count) for rows in lists)
    shares = [len({*a} & {*b}) / size for a, b in zip(*lists, strict=True)]
    assert dense_run.found_again(wanted, among).tolist() == pytest.approx(
        [math.fsum(shares) / heads]
    )


def test_padding_is_in_no_list() -> None:
    indices = torch.tensor([[[0, 3, -1], [-1, -1, -1]]], dtype=torch.int32)
    assert members(indices, 5).tolist() == [[[True, False, False, True, False], [False] * 5]]
    assert dense_run.tokens_read(members(indices, 5), 2).tolist() == [1.0]


def test_what_two_query_heads_read_counts_once() -> None:
    indices = torch.tensor([[[0, 3], [3, 4], [1, 2], [1, 2]]], dtype=torch.int32)
    tokens = members(indices, 6)
    assert dense_run.tokens_read(tokens, 2).tolist() == [(3 + 2) / 2]
    assert dense_run.tokens_read(tokens, 1).tolist() == [5]
    assert dense_run.tokens_read(tokens, 4).tolist() == [2]
    assert dense_run.tokens_read(tokens[:, :1], 2).tolist() == [2]


def test_pages_sum_their_tokens() -> None:
    scores = torch.arange(12.0).reshape(1, 2, 6)
    assert dense_run.page_sums(scores, 3).tolist() == [[[3, 12], [21, 30]]]

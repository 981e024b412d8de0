"""Extreme keys, and the scores of blocks by them, are those of plain loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from keyhole.reuse import block_scores
from keyhole.reuse.block_scores import extreme_keys, extreme_scores

HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1)])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_keys(keys: np.ndarray, block_size: int) -> np.ndarray:
    """One block and head after the other; farthest first, the farthest again where keys lack."""
    k = math.ceil(block_size / 8)
    found = []
    for start in range(0, len(keys), block_size):
        block = keys[start : start + block_size]
        of_heads = []
        for head in range(keys.shape[1]):
            rows = block[:, head]
            distance = [((row - rows.mean(0)) ** 2).sum() for row in rows]
            order = sorted(range(len(rows)), key=lambda t: (-distance[t], t))[:k]
            of_heads.append(rows[order + [order[0]] * (k - len(order))])
        found.append(np.stack(of_heads, 1))
    return np.stack(found)


def plain_scores(query: np.ndarray, keys: np.ndarray) -> list[float]:
    """Of each block the best over tokens, heads and keys, in deviations of that token and head."""
    group = query.shape[1] // keys.shape[2]
    best = [-math.inf] * len(keys)
    for token in query:
        for head, q in enumerate(token):
            scores = keys[:, :, head // group] @ q
            spread = scores.std() or 1.0
            for block, of_block in enumerate(scores):
                best[block] = max(best[block], (of_block.max() - scores.mean()) / spread)
    return best


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("block_size", [1, 8, 12, 64])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
def test_the_keys_farthest_from_their_mean(length: int, block_size: int, kv_heads: int) -> None:
    keys = normal(length, kv_heads, 5, seed=length)
    found = extreme_keys(keys, block_size)
    assert found.dtype == keys.dtype
    np.testing.assert_array_equal(found.numpy(), plain_keys(keys.double().numpy(), block_size))


def test_keys_keep_their_dtype_and_equal_ones_their_order() -> None:
    keys = torch.zeros(20, 2, 4, dtype=torch.bfloat16)
    keys[5, 1], keys[9, 1] = 1, -1
    found = extreme_keys(keys, 16)
    assert found.dtype == torch.bfloat16
    assert found.shape == (2, 2, 2, 4)
    assert found[0, :, 1, 0].tolist() == [1, -1]
    assert found[0, :, 0].count_nonzero() == 0


def test_keys_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = normal(203, 2, 4)
    whole = extreme_keys(keys, 16)
    monkeypatch.setattr(block_scores, "_PIECE", 16 * 2 * 4 * 3)
    assert torch.equal(extreme_keys(keys, 16), whole)


@HEADS
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("piece", [1, 1 << 22])
def test_the_scores_of_blocks(
    heads: int, kv_heads: int, tokens: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_scores, "_PIECE", piece)
    query, keys = normal(tokens, heads, 5), normal(11, 3, kv_heads, 5, seed=1)
    found = extreme_scores(query, keys)
    assert (found.dtype, found.shape) == (torch.float32, (11,))
    wanted = plain_scores(query.double().numpy(), keys.double().numpy())
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4)


def test_one_key_that_a_mean_hides_is_found() -> None:
    """Of 64 keys one answers one of nine tokens, in one head; the block's mean tells nothing."""
    keys = normal(20 * 64, 2, 32)
    query = normal(9, 8, 32, seed=1)
    keys[13 * 64 + 40, 1] = 3 * query[4, 6]
    scores = extreme_scores(query, extreme_keys(keys, 64))
    assert scores.argmax() == 13
    means = keys.view(20, 64, 2, 32).mean(1)
    of_means = torch.einsum("hgd,nhd->n", query.mean(0).view(2, 4, 32), means)
    assert of_means.argmax() != 13


def test_keys_that_all_score_the_same_score_nothing() -> None:
    assert extreme_scores(normal(3, 4, 5), torch.zeros(6, 2, 2, 5)).tolist() == [0.0] * 6

"""Block statistics equal those read off a whole attention map, which is never made."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from keyhole.reuse import block_statistics
from keyhole.reuse.block_statistics import (
    BlockMeans,
    BlockStatistics,
    ReceivedAttention,
    block_means,
)


def attention_map(
    query: Tensor,
    keys: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Weights of a whole document, float64 [n, n], mean over heads; NaN where nothing is seen."""
    n, heads, _ = query.shape
    group = heads // keys.shape[1]
    total = torch.zeros(n, n, dtype=torch.float64)
    hidden = torch.ones(n, n, dtype=torch.bool)
    for t in range(n):
        hidden[t, 0 if window is None else max(0, t - window + 1) : t + 1] = False
    for h in range(heads):
        scores = scale * query[:, h].double() @ keys[:, h // group].double().T
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        raw = scores.exp().masked_fill(hidden, 0)
        extra = 0 if sinks is None else sinks[h].double().exp()
        total += raw / (raw.sum(1, keepdim=True) + extra)
    return (total / heads).masked_fill(hidden, math.nan)


def bins_of(y: Tensor) -> list[tuple[float, float]]:
    """(mean distance, mean attention) per bin of what a token receives, y[i] at distance i + 1."""
    found: dict[int, list[int]] = {}
    for delta in range(1, len(y) + 1):
        b = math.floor(2 * math.log2(delta) + 1e-9)
        found.setdefault(b, []).append(delta)
    return [
        (sum(deltas) / len(deltas), float(np.mean([y[d - 1] for d in deltas])))
        for deltas in found.values()
    ]


def expected(weights: Tensor, block_size: int) -> BlockStatistics:
    n = len(weights)
    tokens, alphas, means = [], [], []
    received = []
    for t in range(n):
        column = weights[t + 1 :, t]
        column = column[~column.isnan()]
        received.append((float(column.mean()) if len(column) else 0.0, column))
    for start in range(0, n, block_size):
        best = max(range(start, min(n, start + block_size)), key=lambda t: received[t][0])
        points = bins_of(received[best][1])
        alpha = math.inf
        if len(points) > 1:
            x, y = np.log(np.array(points)).T
            alpha = -float(np.polyfit(x, y, 1)[0])
        tokens.append(best)
        alphas.append(alpha)
        means.append(received[best][0])
    return BlockStatistics(torch.tensor(tokens), torch.tensor(alphas), torch.tensor(means))


def streamed(
    query: Tensor, keys: Tensor, block_size: int, chunk: int, **options: Any
) -> BlockStatistics:
    attention = ReceivedAttention(len(query), block_size)
    for start in range(0, len(query), chunk):
        part = query[start : start + chunk]
        attention.add(part, keys[: start + len(part)], start, **options)
    return attention.finish()


def tensors(n: int, heads: int, kv_heads: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn(n, heads, 16, generator=rng)
    return query, torch.randn(n, kv_heads, 16, generator=rng)


def check(found: BlockStatistics, wanted: BlockStatistics) -> None:
    assert found.representatives.dtype == torch.int64
    assert found.alpha.dtype == found.received.dtype == torch.float32
    assert found.representatives.tolist() == wanted.representatives.tolist()
    torch.testing.assert_close(found.received, wanted.received, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.alpha, wanted.alpha, rtol=1e-3, atol=1e-4)


SINKS = torch.tensor([1.0, -2.0, 0.5, 3.0])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0},
        {"sinks": SINKS},
        {"window": 13},
        {"softcap": 3.0, "sinks": SINKS, "window": 40},
    ],
    ids=["plain", "softcap", "sinks", "window", "all"],
)
@pytest.mark.parametrize("chunk", [200, 7, 64])
def test_they_are_those_of_the_whole_map(
    heads: tuple[int, int], options: dict[str, Any], chunk: int
) -> None:
    query, keys = tensors(139, *heads)
    found = streamed(query, keys, 16, chunk, scale=0.5, **options)
    check(found, expected(attention_map(query, keys, 0.5, **options), 16))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 15, 16, 17, 18, 33])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_short_documents_and_blocks(length: int, block_size: int) -> None:
    query, keys = tensors(length, 4, 2, seed=length)
    found = streamed(query, keys, block_size, 5, scale=0.3)
    check(found, expected(attention_map(query, keys, 0.3), block_size))


def test_rows_at_hand_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys = tensors(150, 4, 2)
    whole = streamed(query, keys, 16, 150, scale=0.5)
    monkeypatch.setitem(block_statistics._MOST_WEIGHTS, "cpu", 1)  # a row at a time
    check(streamed(query, keys, 16, 31, scale=0.5), whole)
    check(streamed(query, keys, 16, 31, scale=0.5, window=150), whole)


def test_a_power_law_gives_its_exponent() -> None:
    """Weights made to fall as distance^-0.7 from every token: a query of one number does that."""
    n = 400
    token = torch.arange(n)
    # Block 0's representative is token 0: all others are never looked at by anybody else.
    weights = torch.zeros(n, n)
    weights[1:, 0] = 0.5 * token[1:].float() ** -0.7
    attention = ReceivedAttention(n, 50)
    distance = token[:, None] - token
    for start in range(0, n, 90):
        rows = slice(start, min(n, start + 90))
        attention._collect(weights[rows], distance[rows], start, 0)
    attention._seen = n
    found = attention.finish()
    assert int(found.representatives[0]) == 0
    assert float(found.alpha[0]) == pytest.approx(0.7, abs=0.01)
    assert float(found.received[0]) == pytest.approx(float(weights[1:, 0].mean()), rel=1e-5)


def test_the_last_token_alone_in_its_block_received_nothing_and_has_no_slope() -> None:
    query, keys = tensors(17, 4, 2)
    found = streamed(query, keys, 16, 17, scale=0.5)
    assert int(found.representatives[1]) == 16
    assert float(found.received[1]) == 0
    assert float(found.alpha[1]) == math.inf


def test_weights_that_are_zero_in_float32_count_as_very_small_ones() -> None:
    """Their logarithm made alpha NaN."""
    query, keys = torch.full((100, 1, 2), 100.0), torch.zeros(100, 1, 2)
    keys[:50] = -100.0  # exp(-20000) from the second half of the document
    found = streamed(query, keys, 1, 33, scale=1.0)
    assert (found.alpha[:48] > 1).all()
    assert found.alpha[:48].isfinite().all()


def test_a_token_that_receives_nothing_is_the_least_important() -> None:
    """A line that is flat at nothing has slope 0, which would be the most important."""
    query, keys = torch.full((100, 1, 2), 100.0), torch.zeros(100, 1, 2)
    keys[49] = -100.0
    found = streamed(query, keys, 1, 33, scale=1.0)
    assert float(found.received[49]) == 0
    assert float(found.alpha[49]) == math.inf
    assert found.alpha[48].isfinite()


class _Largest(TorchDispatchMode):
    """Numbers of the largest tensor that any operation gives."""

    numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_no_map_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(block_statistics._MOST_WEIGHTS, "cpu", 1 << 12)
    n = 512
    query, keys = tensors(n, 4, 2)
    with _Largest() as largest:
        streamed(query, keys, 64, 100, scale=0.5)
    # The keys have 32 numbers per token.
    assert 32 * n <= largest.numbers <= 40 * n < n * n / 8


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("chunk", [1, 50, 64, 200])
def test_block_means_from_chunks_that_end_anywhere(length: int, chunk: int) -> None:
    rows = torch.randn(length, 3, 5, generator=torch.Generator().manual_seed(length))
    wanted = torch.stack([part.double().mean(0) for part in rows.split(64)]).float()
    means = BlockMeans(length, 64)
    for part in rows.split(chunk):
        means.add(part)
    torch.testing.assert_close(means.finish(), wanted)
    torch.testing.assert_close(block_means(rows, 64), wanted)


def test_block_means_of_16_bit_rows_are_float32() -> None:
    rows = torch.randn(100, 2, 4).bfloat16()
    found = block_means(rows, 64)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0], rows[:64].float().mean(0))


def test_what_was_not_added_in_order_is_refused() -> None:
    query, keys = tensors(10, 4, 2)
    attention = ReceivedAttention(10, 4)
    with pytest.raises(AssertionError, match="in order"):
        attention.add(query[3:], keys, 3, scale=1.0)
    with pytest.raises(AssertionError, match="before the end"):
        attention.finish()

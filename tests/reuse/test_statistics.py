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
    """Weights of a whole document, float64 [heads, n, n]; NaN where nothing is seen."""
    n, heads, _ = query.shape
    group = heads // keys.shape[1]
    found = []
    hidden = torch.ones(n, n, dtype=torch.bool)
    for t in range(n):
        hidden[t, 0 if window is None else max(0, t - window + 1) : t + 1] = False
    for h in range(heads):
        scores = scale * query[:, h].double() @ keys[:, h // group].double().T
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        raw = scores.exp().masked_fill(hidden, 0)
        extra = 0 if sinks is None else sinks[h].double().exp()
        found.append(raw / (raw.sum(1, keepdim=True) + extra))
    return torch.stack(found).masked_fill(hidden, math.nan)


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


def expected(heads: Tensor, block_size: int, window: int | None = None) -> BlockStatistics:
    n = heads.shape[1]
    most = block_size if window is None else min(block_size, window - 1)
    tokens, alphas, means = [], [], []
    shares: list[list[float]] = [[] for _ in range(n)]  # what each token receives, nearest first
    for t in range(1, n):
        for s in range(max(0, t - most), t):
            whole = heads[:, t, max(0, t - most) : t].sum(1)
            shares[s].append(float((heads[:, t, s] / whole).mean()))
    for start in range(0, n, block_size):
        block = range(start, min(n, start + block_size))
        best = max(block, key=lambda t: float(np.mean(shares[t])) if shares[t] else 0.0)
        alpha = mean = math.inf
        if best + 1 >= most > 0 and best + most < n:  # seen from every distance, by whole queries
            mean = float(np.mean(shares[best]))
            points = bins_of(torch.tensor(shares[best], dtype=torch.float64))
            if len(points) > 1:
                x, logs = np.log(np.array(points)).T
                alpha = -float(np.polyfit(x, logs, 1)[0])
        tokens.append(best)
        alphas.append(alpha)
        means.append(mean)
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


@pytest.mark.one_in(8)
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
    weights = attention_map(query, keys, 0.5, **options)
    check(found, expected(weights, 16, options.get("window")))
    assert found.alpha[1:7].isfinite().all()


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
    """Shares that fall as distance^-0.7 from one token; every other has the rest in equal parts."""
    n, size = 400, 50
    near = torch.arange(n)[:, None] - torch.arange(1, size + 1)
    shares = torch.where(near >= 0, 1.0 / (size - 1), 0.0)
    law = 0.5 * torch.arange(1, size + 1).float() ** -0.7
    readers = slice(101, 101 + size)
    shares[readers] *= 1 - law[:, None]
    shares[readers][near[readers] == 100] = law
    attention = ReceivedAttention(n, size)
    for start in range(0, n, 90):
        attention._collect(shares[start : start + 90], near[start : start + 90])
    attention._seen = n
    found = attention.finish()
    assert int(found.representatives[2]) == 100
    # The fit takes means over bins of half an octave, each at its middle distance.
    assert float(found.alpha[2]) == pytest.approx(0.7, abs=0.002)
    # Fifty float32 shares, added up in another order.
    assert float(found.received[2]) == pytest.approx(float(law.mean()), rel=1e-5)


def test_the_blocks_of_exchangeable_text_are_alike() -> None:
    """Alpha fell along any document: late blocks are seen from few distances.

    Keys and queries are drawn at random, so no block differs from another. A line through the
    alphas and one through the received attention of middle blocks are flat within three standard
    errors, and the middles of all documents lie together.
    """
    n, size, documents = 1056, 32, 48
    alphas, received = [], []
    for seed in range(documents):
        query, keys = tensors(n, 2, 1, seed=seed)
        found = streamed(query, keys, size, 352, scale=0.25)
        assert found.alpha[1:-2].isfinite().all()
        alphas.append(found.alpha[1:-2])
        received.append(found.received[1:-2])
    for many in (torch.stack(alphas).double(), torch.stack(received).double()):
        place = torch.linspace(-1, 1, many.shape[1], dtype=torch.float64)
        slopes = many @ place / place.square().sum()  # of every document
        error = slopes.std() / math.sqrt(documents)
        assert abs(slopes.mean()) < 3 * error
        assert error < 0.1 * many.std()  # so that a trend as large as the noise is seen


def test_the_last_token_alone_in_its_block_received_nothing_and_has_no_slope() -> None:
    query, keys = tensors(17, 4, 2)
    found = streamed(query, keys, 16, 17, scale=0.5)
    assert int(found.representatives[1]) == 16
    assert float(found.received[1]) == math.inf
    assert float(found.alpha[1]) == math.inf


def test_weights_that_are_zero_in_float32_count_as_very_small_ones() -> None:
    """Their logarithm made alpha NaN."""
    query, keys = torch.full((100, 1, 2), 100.0), torch.zeros(100, 1, 2)
    keys[47:50] = -100.0  # exp(-20000)
    keys[44, 0] = 1.0
    keys[52:] = 100.0  # hides token 44 from queries 8 and more tokens later
    found = streamed(query, keys, 16, 33, scale=1.0)
    assert int(found.representatives[2]) == 44
    assert found.alpha[2].isfinite()
    assert float(found.alpha[2]) > 1


def test_a_representative_always_receives_something() -> None:
    """The query after a block sees its tokens alone, however little others attend to them."""
    query, keys = torch.full((100, 1, 2), 100.0), torch.zeros(100, 1, 2)
    keys[32:48] = -100.0
    found = streamed(query, keys, 16, 33, scale=1.0)
    assert int(found.representatives[2]) == 32
    assert float(found.received[2]) == pytest.approx(1 / 16 / 16)
    assert float(found.alpha[2]) < found.alpha[1]


class _Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.slow
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

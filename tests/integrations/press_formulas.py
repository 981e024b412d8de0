"""The formulas of kvpress's methods once more.

Queries [Hq, n, D] and keys [Hkv, m, D] as rotated, values [Hkv, m, D]. Each gives a score for every
KV head and token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracle import Array

SNAPKV = {"window_size": 8, "kernel_size": 3}
EXPECTED = {"n_sink": 3, "n_future_positions": 20}


def weights(query: Array, keys: Array, last: int) -> Array:
    """Attention [Hq, m] of one query [Hq, D] over the first `last` keys; 0 beyond."""
    group = len(query) // len(keys)
    found = np.zeros((len(query), keys.shape[1]))
    for head, row in enumerate(query):
        logits = keys[head // group, :last] @ row / math.sqrt(len(row))
        found[head, :last] = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    return found


def per_group(scores: Array, heads: int) -> Array:
    """Mean over the query heads that share a KV head."""
    return scores.reshape(heads, -1, scores.shape[-1]).mean(1)


def snapkv(queries: Array, keys: Array, values: Array) -> Array:
    n, window, half = keys.shape[1], SNAPKV["window_size"], SNAPKV["kernel_size"] // 2
    rows = [weights(queries[:, t], keys, t + 1) for t in range(n - window, n)]
    received = per_group(np.mean(rows, 0), len(keys))[:, : n - window]
    padded = np.pad(received, ((0, 0), (half, half)))
    pooled = [padded[:, i : i + 2 * half + 1].mean(1) for i in range(n - window)]
    return np.pad(np.stack(pooled, 1), ((0, 0), (0, window)))


def observed_attention(queries: Array, keys: Array, values: Array) -> Array:
    n = keys.shape[1]
    rows = [weights(queries[:, t], keys, t + 1) for t in range(n)]
    return per_group(np.sum(rows, 0) / np.arange(n, 0, -1), len(keys))


def tova(queries: Array, keys: Array, values: Array) -> Array:
    mean = weights(queries[:, -1], keys, keys.shape[1]).mean(0)
    return np.stack([mean] * len(keys))


def knorm(queries: Array, keys: Array, values: Array) -> Array:
    return -np.sqrt((keys**2).sum(-1))


def keydiff(queries: Array, keys: Array, values: Array) -> Array:
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    anchor = unit.mean(1, keepdims=True)
    return -(unit * anchor).sum(-1) / np.linalg.norm(anchor, axis=-1)


def streaming_llm(queries: Array, keys: Array, values: Array) -> Array:
    return np.tile(np.arange(keys.shape[1], dtype=float), (len(keys), 1))


def expected_attention(queries: Array, keys: Array, values: Array) -> Array:
    """With queries as normally distributed, turned to the mean of the next positions."""
    n, dim, sink = keys.shape[1], keys.shape[2], EXPECTED["n_sink"]
    angle = 10000.0 ** (-np.arange(0, dim, 2) / dim)
    back = np.exp(-1j * np.arange(n)[:, None] * angle)
    flat = (queries[..., : dim // 2] + 1j * queries[..., dim // 2 :]) * back
    flat = np.concatenate((flat.real, flat.imag), -1)[:, sink:]
    future = np.arange(n, n + EXPECTED["n_future_positions"])[:, None]
    turn = np.exp(1j * future * angle).mean(0)
    turn = np.block(
        [[np.diag(turn.real), -np.diag(turn.imag)], [np.diag(turn.imag), np.diag(turn.real)]]
    )
    scores = np.zeros((len(flat), n))
    for head, rows in enumerate(flat):
        mean, spread = turn @ rows.mean(0), turn @ np.cov(rows.T, bias=True) @ turn.T
        own = keys[head // (len(flat) // len(keys)), sink:]
        logits = [k @ mean / math.sqrt(dim) + k @ spread @ k / (2 * dim) for k in own]
        scores[head, sink:] = np.exp(logits - max(logits))
        scores[head] /= scores[head].sum()
    return per_group(scores, len(keys)) * np.linalg.norm(values, axis=-1)


@dataclass(frozen=True)
class Formula:
    """Scores, how many of the first and last tokens are kept anyway, and the press's settings."""

    scores: Callable[[Array, Array, Array], Array]
    first: int = 0
    last: int = 0
    settings: dict[str, Any] | None = None


FORMULAS = {
    "snapkv": Formula(snapkv, last=8, settings=SNAPKV),
    "observed_attention": Formula(observed_attention),
    "tova": Formula(tova, last=1),
    "expected_attention": Formula(expected_attention, first=3, settings=EXPECTED),
    "knorm": Formula(knorm),
    "keydiff": Formula(keydiff),
    "streaming_llm": Formula(streaming_llm, first=2, settings={"n_sink": 2}),
}

"""Stable layers are those where the main block stands out, and their file says what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keyhole.errors import ConfigError
from keyhole.reuse.sam_kv import Stability, stable_layers

STABILITY = Stability(
    model="some-model",
    num_layers=4,
    num_documents=2,
    block_size=64,
    stable_layers=(1, 3),
    scores=(0, 2, 0, 1),
)


def plain_scores(alphas: list[Tensor]) -> list[int]:
    """Appendix A.2 in loops."""
    depth = len(alphas[0])
    scores = [0] * depth
    for alpha in alphas:
        rows = [row[1:-2] for row in alpha.double().tolist()]  # the middle of the document
        blocks = range(len(rows[0]))
        ranks = [
            [sorted(blocks, key=lambda b: (row[b], b)).index(b) for b in blocks] for row in rows
        ]
        main = min(blocks, key=lambda b: (sum(rank[b] for rank in ranks), b))
        for layer, row in enumerate(rows):
            finite = [a for a in row if math.isfinite(a)]
            mean = sum(finite) / len(finite)
            spread = math.sqrt(sum((a - mean) ** 2 for a in finite) / len(finite))
            scores[layer] += row[main] < mean - 3 * spread
    return scores


def made(seed: int, depth: int = 6) -> list[Tensor]:
    """Documents whose block 3 is the most important, in later layers by far."""
    rng = torch.Generator().manual_seed(seed)
    alphas = []
    for number in (17, 30, 22, 9):
        alpha = 1 + 0.1 * torch.randn(depth, number, generator=rng)
        alpha[:, 0] = alpha[:, -2] = -9
        alpha[:, 3] -= torch.rand(depth, generator=rng) * torch.arange(depth) / 3
        alpha[:, -1] = math.inf
        alphas.append(alpha)
    return alphas


@pytest.mark.parametrize("seed", range(8))
def test_a_layer_scores_where_the_main_block_is_an_outlier(seed: int) -> None:
    alphas = made(seed)
    scores, chosen = stable_layers(alphas, 2)
    assert scores == plain_scores(alphas)
    assert chosen == sorted(sorted(range(6), key=lambda layer: (-scores[layer], -layer))[:2])


def test_the_made_documents_tell_layers_apart() -> None:
    assert len({score for seed in range(8) for score in plain_scores(made(seed))}) > 2


def test_equal_scores_go_to_the_later_layers() -> None:
    flat = [torch.full((8, 15), 0.5)]
    assert stable_layers(flat) == ([0] * 8, [4, 5, 6, 7])


def test_only_the_main_block_counts() -> None:
    alpha = torch.full((3, 20), 1.0)
    alpha[:, 2] = 0.9  # best on average
    alpha[1, 7] = -30.0  # an outlier in one layer
    alpha[2, 2] = -30.0
    assert stable_layers([alpha], 1) == ([1, 0, 1], [2])


def test_documents_that_are_too_short_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 14 blocks; the longest has 13"):
        stable_layers([torch.rand(4, 13)])
    with pytest.raises(ConfigError, match="the longest has 0"):
        stable_layers([])


@pytest.mark.parametrize("num", [0, 5, -1])
def test_a_number_of_layers_that_cannot_be_is_refused(num: int) -> None:
    with pytest.raises(ConfigError, match=r"num_stable_layers .* from 1 to 4"):
        stable_layers([torch.rand(4, 15)], num)


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    STABILITY.save(tmp_path / "layers.json")
    assert Stability.load(tmp_path / "layers.json") == STABILITY


@pytest.mark.parametrize("text", [None, "not json", "[]", '{"model": "some-model"}'])
def test_a_file_that_holds_no_stable_layers_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "layers.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"layers\.json"):
        Stability.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"stable_layers": [-1]},
        {"stable_layers": [4]},
        {"stable_layers": []},
        {"stable_layers": "1,3"},
        {"scores": [0, 1]},
        {"scores": [0, 1, 2, -1]},
        {"num_layers": 0},
        {"num_documents": "2"},
        {"block_size": True},
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "layers.json"
    STABILITY.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=rf"layers\.json.*{next(iter(change))}"):
        Stability.load(path)


def test_a_file_for_another_depth_is_refused() -> None:
    STABILITY.check_depth(4)
    with pytest.raises(ConfigError, match="4 layers, but this model has 6"):
        STABILITY.check_depth(6)

import math
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from recipes.tiny_model.curriculum import TrainingBatch, batch_of
from recipes.tiny_model.initial import initial_weights
from recipes.tiny_model.network import llama_config, supervised_logits
from recipes.tiny_model.steadiness import Steadiness

LENGTH, NUM_HEADS, NUM_KV, SIZE, PAGE = 200, 4, 2, 8, 16


@pytest.fixture
def batch() -> TrainingBatch:
    """Two rows; only the steps 150 to 152 of the second are supervised: two pairs of steps."""
    words = ["."] * LENGTH
    rows = [(words, [False] * LENGTH), (words, [150 < at < 154 for at in range(LENGTH)])]
    return batch_of(rows, LENGTH, Random(0), LENGTH)


def logs_of(queries: Tensor, keys: Tensor, step: int, first: int) -> list[float]:
    """The logarithms of the attention at one step on every far page, centred, number by number."""
    pages = [0.0] * -(-LENGTH // PAGE)
    for head in range(NUM_HEADS):
        own = keys[head // (NUM_HEADS // NUM_KV), : step + 1] @ queries[head, step]
        for at, weight in enumerate((own / math.sqrt(SIZE)).softmax(0).tolist()):
            pages[at // PAGE] += weight
    logs = [math.log(pages[page] + 1e-6) for page in range(1, first // PAGE - 1)]
    return [value - sum(logs) / len(logs) for value in logs]


def correlation(one: list[float], other: list[float]) -> float:
    products = sum(a * b for a, b in zip(one, other, strict=True))
    return products / math.sqrt(sum(a * a for a in one) * sum(b * b for b in other) + 1e-6)


def test_is_one_minus_the_correlation_of_steps_and_of_layers(batch: TrainingBatch) -> None:
    torch.manual_seed(0)
    layers = [
        (torch.randn(2, NUM_HEADS, LENGTH, SIZE), torch.randn(2, NUM_KV, LENGTH, SIZE))
        for _ in range(3)
    ]
    found = Steadiness(batch, Random(0))
    for queries, keys in layers:
        found.add(queries, keys)
    differences = []
    for first in (150, 151):
        logs = [
            [logs_of(queries[1], keys[1], step, first) for step in (first, first + 1)]
            for queries, keys in layers
        ]
        differences += [1 - correlation(*steps) for steps in logs]
        differences += [1 - correlation(one[0], other[0]) for one, other in pairwise(logs)]
    # float32 against Python's numbers, through a softmax and a logarithm.
    assert float(found.loss()) == pytest.approx(sum(differences) / len(differences), rel=1e-4)


def test_a_batch_without_such_steps_costs_nothing() -> None:
    batch = batch_of([(["."] * 64, [at > 40 for at in range(64)])], 64, Random(0), 64)
    found = Steadiness(batch, Random(0))
    found.add(torch.randn(1, 8, 64, 8), torch.randn(1, 2, 64, 8))
    assert found.loss() == 0


def test_training_on_it_makes_attention_steadier(batch: TrainingBatch) -> None:
    config = llama_config(num_layers=3)
    weights = {name: w.requires_grad_() for name, w in initial_weights(config, 0).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-4)
    losses = []
    for _ in range(5):
        seen = Steadiness(batch, Random(0))
        supervised_logits(weights, batch, config, torch.float32, seen)
        loss = seen.loss()
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]

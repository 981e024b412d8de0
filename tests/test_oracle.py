"""The oracle is checked against transformers itself, so that it cannot be wrong as keyhole is."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import make_config, make_network
from tests.oracle import SparseModel, best, visible
from tests.policies.models import prompt


@pytest.mark.parametrize("kind", ["llama_group3", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"])
def test_without_a_choice_it_is_eager_attention(kind: str) -> None:
    network = make_network(make_config(kind, vocab_size=64))
    tokens = prompt(21)
    with torch.no_grad():
        wanted = network(torch.tensor([tokens])).logits[0]
    found = SparseModel(network, lambda *_: None).logits(tokens, start=5)
    assert (found - wanted).abs().max() < 1e-4


def test_a_choice_of_everything_changes_nothing_and_a_narrow_one_does() -> None:
    network = make_network(make_config("llama", vocab_size=64))
    tokens = prompt(21)
    logits = [
        SparseModel(network, choose).logits(tokens, start=11)
        for choose in (
            lambda *_: None,
            lambda layer, query, keys, options: ([], [visible(keys.shape[1])]),
            lambda layer, query, keys, options: ([], [visible(keys.shape[1], window=3)]),
        )
    ]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0][:11], logits[2][:11])
    assert (logits[0] - logits[2])[11:].abs().amax(1).min() > 1e-2


def test_best_on_an_example() -> None:
    assert best([3.0, 1.0, 3.0, 2.0, 0.0], 3) == [0, 2, 3]
    assert best([1.0, 1.0, 1.0, 1.0], 2) == [0, 1]
    assert best([1.0, 5.0, 1.0, 1.0], 3, first=1, last=1) == [0, 1, 3]
    assert best([1.0, 5.0], 3, last=2) == [0, 1]

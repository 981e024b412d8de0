"""What is measured for DELTA agrees with transformers' own attention weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from keyhole import LLM, Delta, SamplingParams
from keyhole.errors import ConfigError
from keyhole.evaluate.calibrate import Measurement, Role, calibrate, measure
from keyhole.models.loading import Model, load
from tests.checkpoints import make_model

PAGE, BUDGET, RECENT, NEW = 4, 16, 1, 9
PROMPT = [3 + 41 * i % 251 for i in range(30)]


def weights(path: str, tokens: list[int]) -> np.ndarray:
    """Attention weights of transformers, [L, Hq, T, T]."""
    network = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        found = network(torch.tensor([tokens]), output_attentions=True).attentions
    return np.stack([layer[0].double().numpy() for layer in found])


def expected(attention: np.ndarray, positions: range) -> tuple[np.ndarray, np.ndarray]:
    """recall and shift by the book, for the queries at `positions`."""
    depth = len(attention)
    recall, shift = np.zeros((depth, depth)), np.zeros(depth)
    for position in positions:
        row = attention[:, :, position, : position + 1]
        starts = np.arange(0, position + 1, PAGE)
        mass = np.add.reduceat(row.sum(1), starts, axis=1)
        mass /= mass.sum(1, keepdims=True)
        scores = np.add.reduceat(row.max(1), starts, axis=1)
        for a in range(depth):
            others = len(starts) - RECENT
            best = np.argsort(-scores[a, :others], kind="stable")[: BUDGET // PAGE - RECENT]
            chosen = [*best, *range(others, len(starts))]
            for b in range(a, depth):
                recall[a, b] += mass[b, chosen].sum()
        shift[1:] += np.abs(mass[1:] - mass[:-1]).sum(1) / 2
    return recall / len(positions), shift / len(positions)


def test_recall_and_shift_are_those_of_the_models_attention(tmp_path: Path) -> None:
    path = make_model("llama_group3", tmp_path)
    model = load(path, device="cpu")
    found = measure(
        model,
        [{"prompt_token_ids": PROMPT}],
        token_budget=BUDGET,
        recent_pages=RECENT,
        max_tokens=NEW,
        page_size=PAGE,
    )
    params = SamplingParams(max_tokens=NEW, temperature=0)
    result = LLM(model).generate({"prompt_token_ids": PROMPT}, params)
    tokens = PROMPT + result.token_ids
    positions = range(len(PROMPT), len(tokens) - 1)  # the first new token comes from the prefill
    assert found.steps == len(positions)
    recall, shift = expected(weights(path, tokens), positions)
    assert np.allclose(found.recall, recall, atol=1e-5)
    assert np.allclose(found.shift, shift, atol=1e-5)


def test_steps_within_the_budget_do_not_count(model: Model) -> None:
    prompts: list[Any] = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:10]}]
    params = {"token_budget": 32, "max_tokens": 8, "page_size": PAGE}
    alone, both = measure(model, prompts[:1], **params), measure(model, prompts, **params)
    assert alone.steps == both.steps == 5  # lengths 33 .. 37
    assert np.allclose(alone.recall, both.recall, atol=1e-6)
    with pytest.raises(ConfigError, match="longest prompt and its continuation have 18"):
        measure(model, prompts[1:], **params)


def found(recall: list[list[float]], layers: tuple[int, ...]) -> Measurement:
    shift = [0.0, 0.1, 0.2, 0.9, 0.3]
    return Measurement(
        model="m", layers=layers, token_budget=64, recall=recall, shift=shift, steps=1
    )


def test_layers_before_the_first_that_chooses_read_everything() -> None:
    recall = [[0.1 * b for b in range(5)] for _ in range(5)]
    placed = found(recall, (0, 1, 2, 3, 4)).place("paper", 1, (0,))
    assert placed.delta_layers == (3,)
    assert placed.recall == (1, 1, 1, 1, 0.4)
    placed = found(recall, (0, 1, 2, 3, 4)).place("optimal", 2, (0,))
    assert placed.delta_layers == (1, 2)
    assert placed.recall == (1, 1, 1, 0.3, 0.4)


def test_layers_with_a_window_of_their_own_have_no_part() -> None:
    recall = [[0.1 * b for b in range(5)] for _ in range(5)]
    measured = found(recall, (1, 3, 4))
    placed = measured.place("optimal", 1, ())
    assert placed.delta_layers == (1,)
    roles = measured.roles(placed.full_layers, placed.delta_layers)
    window, sparse = Role("window"), Role("sparse", 1)
    assert roles == [window, Role("selects"), window, sparse, sparse]


def test_a_calibration_is_what_delta_takes(tmp_path: Path) -> None:
    model = load(make_model("gemma3", tmp_path), device="cpu")
    placed = calibrate(
        model,
        [{"prompt_token_ids": PROMPT}],
        num_delta_layers=1,
        token_budget=16,
        full_layers=(),
        max_tokens=6,
    )
    assert placed.delta_layers == (1,)  # of layers 0 .. 3, those with full attention are 1 and 3
    placed.save(tmp_path / "layers.json")
    policy = LLM(model, policy=Delta(token_budget=16, layers=str(tmp_path / "layers.json"))).policy
    assert isinstance(policy, Delta)
    assert (policy.full_layers, policy.delta_layers) == ((), (1,))

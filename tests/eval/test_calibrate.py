"""What is measured for DELTA agrees with transformers' own attention weights and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from keyhole import LLM, Delta, SamplingParams
from keyhole.errors import ConfigError
from keyhole.eval.calibrate import Measurement, Role, measured
from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import make_model

PAGE, BUDGET, RECENT, NEW = 4, 16, 1, 9
PROMPT = [3 + 41 * i % 251 for i in range(30)]


def weights(path: str, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Attention weights of transformers, [L, Hq, T, T], and its values, [L, Hq, T, D]."""
    network = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    values: list[torch.Tensor] = []
    heads, dim = network.config.num_attention_heads, network.config.head_dim
    for layer in network.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda *call: values.append(call[2][0]))
    with torch.no_grad():
        found = network(torch.tensor([tokens]), output_attentions=True).attentions
    rows = []
    for value in values:
        split = value.double().numpy().reshape(len(tokens), -1, dim).transpose(1, 0, 2)
        rows.append(split.repeat(heads // len(split), axis=0))
    return np.stack([layer[0].double().numpy() for layer in found]), np.stack(rows)


def expected(
    attention: np.ndarray, values: np.ndarray, positions: range
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """recall, error and shift by the book, for the queries at `positions`."""
    depth = len(attention)
    recall, error, shift = np.zeros((depth, depth)), np.zeros((depth, depth)), np.zeros(depth)
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
            tokens = [t for page in chosen for t in range(page * PAGE, (page + 1) * PAGE)]
            tokens = [t for t in tokens if t <= position]
            for b in range(a, depth):
                recall[a, b] += mass[b, chosen].sum()
                full = np.einsum("ht,htd->hd", row[b], values[b, :, : position + 1])
                own = row[b][:, tokens] / row[b][:, tokens].sum(1, keepdims=True)
                sparse = np.einsum("ht,htd->hd", own, values[b][:, tokens])
                error[a, b] += np.linalg.norm(sparse - full) / np.linalg.norm(full)
        shift[1:] += np.abs(mass[1:] - mass[:-1]).sum(1) / 2
    return recall / len(positions), error / len(positions), shift / len(positions)


def test_recall_error_and_shift_are_those_of_the_models_attention(tmp_path: Path) -> None:
    path = make_model("llama_group3", tmp_path)
    model = load(path, device="cpu")
    found = measured(
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
    recall, error, shift = expected(*weights(path, tokens), positions)
    assert np.allclose(found.recall, recall, atol=1e-5)
    assert np.allclose(found.error, error, atol=1e-5)
    assert np.allclose(found.shift, shift, atol=1e-5)
    assert found.sparse_share == pytest.approx(np.mean([BUDGET / (n + 1) for n in positions]))


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "gemma2"])
def test_an_error_is_that_of_what_comes_out_of_attention(tmp_path: Path, kind: str) -> None:
    """A budget of all but one page, and every page: small errors, and none."""
    model = load(make_model(kind, tmp_path, num_hidden_layers=4), device="cpu")
    prompt: Any = {"prompt_token_ids": PROMPT}
    settings: Any = {"max_tokens": 3, "page_size": PAGE}
    near = measured(model, [prompt], token_budget=28, **settings)
    far = measured(model, [prompt], token_budget=8, **settings)
    place = np.ix_(near.layers, near.layers)
    small, large = (np.triu(np.array(m.error)[place]) for m in (near, far))
    assert 0 < small.sum() < large.sum()
    assert (np.tril(np.array(near.error)[place], -1) == 0).all()


def test_steps_within_the_budget_do_not_count(model: Model) -> None:
    prompts: list[Any] = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:10]}]
    params = {"token_budget": 32, "max_tokens": 8, "page_size": PAGE}
    alone, both = measured(model, prompts[:1], **params), measured(model, prompts, **params)
    assert alone.steps == both.steps == 5  # lengths 33 .. 37
    assert np.allclose(alone.recall, both.recall, atol=1e-6)
    assert np.allclose(alone.error, both.error, atol=1e-5)
    assert alone.sparse_share == pytest.approx(both.sparse_share)
    with pytest.raises(ConfigError, match="longest prompt and its continuation have 18"):
        measured(model, prompts[1:], **params)


ERROR = [[0.5 / (1 + b) for b in range(5)] for _ in range(5)]


def found(recall: list[list[float]], layers: tuple[int, ...]) -> Measurement:
    shift = [0.0, 0.1, 0.2, 0.9, 0.3]
    return Measurement(
        model="m",
        layers=layers,
        token_budget=64,
        recall=recall,
        error=ERROR,
        shift=shift,
        steps=1,
        sparse_share=0.25,
    )


def test_layers_before_the_first_that_chooses_read_everything() -> None:
    recall = [[0.1 * b for b in range(5)] for _ in range(5)]
    measured = found(recall, (0, 1, 2, 3, 4))
    placed = measured.place("paper", 1, (0,))
    assert placed.delta_layers == (1,)
    assert placed.measure == "shift"
    assert placed.recall == (1, 1, 0.2, 0.3, 0.4)
    assert placed.error == (0, 0, 0.1667, 0.125, 0.1)
    assert measured.place("paper", 2, (0,)).delta_layers == (1, 3)
    placed = measured.place("optimal", 2, (0,))
    assert (placed.delta_layers, placed.measure) == ((1, 2), "mass")
    assert placed.recall == (1, 1, 1, 0.3, 0.4)
    late = measured.expected((0,), (3,), "paper", "shift")
    assert late.recall == (1, 1, 1, 1, 0.4)


def test_what_is_measured_decides_where_layers_go() -> None:
    """Late layers keep least of their mass here, and early ones have the largest errors."""
    measured = found([[1.0 - 0.1 * b for b in range(5)] for _ in range(5)], (0, 1, 2, 3, 4))
    assert measured.place("optimal", 2, (0,), "mass").delta_layers == (1, 4)
    by_error = measured.place("optimal", 2, (0,), "error")
    assert (by_error.delta_layers, by_error.measure) == ((1, 2), "error")


def test_the_cost_of_a_placement_is_that_of_its_sparse_layers() -> None:
    recall = [[0.1 * b for b in range(5)] for _ in range(5)]
    measured = found(recall, (0, 1, 2, 3, 4))
    cost = measured.cost(measured.place("paper", 2, (0,)))
    assert cost.dense_layers == (0, 1, 3)
    assert cost.recall == pytest.approx((0.2 + 0.4) / 2)
    assert cost.error == pytest.approx((0.1667 + 0.1) / 2)
    assert cost.keys_read == pytest.approx((3 + 2 * 0.25) / 5)
    cost = measured.cost(measured.expected((0,), (4,), "paper", "shift"))
    assert cost == ((0, 1, 2, 3, 4), 1.0, 0.0, 1.0)


@pytest.mark.parametrize("method", ["paper", "optimal"])
def test_a_choice_that_leaves_no_sparse_layer_is_refused(method: Any) -> None:
    measured = found([[1.0] * 5 for _ in range(5)], (0, 1, 2, 3, 4))
    measured.place(method, 3, (0,))
    with pytest.raises(ConfigError, match=r"num_delta_layers 4 .* fewer than the 4"):
        measured.place(method, 4, (0,))
    with pytest.raises(ConfigError, match=r"full_layers \(0, 1, 2, 3\) must be without at least"):
        measured.place(method, 1, (0, 1, 2, 3))  # it was: 1 must be at least 1, fewer than the 1


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
    prompts = [{"prompt_token_ids": PROMPT}]
    found = measured(model, prompts, token_budget=16, recent_pages=None, max_tokens=6)
    placed = found.place("optimal", 1, ())
    assert placed.delta_layers == (1,)  # of layers 0 .. 3, those with full attention are 1 and 3
    placed.save(tmp_path / "layers.json")
    policy = LLM(model, policy=Delta(token_budget=16, layers=str(tmp_path / "layers.json"))).policy
    assert isinstance(policy, Delta)
    assert (policy.full_layers, policy.delta_layers) == ((), (1,))

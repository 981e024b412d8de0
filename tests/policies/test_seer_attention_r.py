"""Pages of the highest gate score per KV head, in a whole model, and pooled keys that stay true."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from keyhole import LLM, ConfigError, ModelError, SeerAttentionR
from keyhole.engine.engine import Engine
from keyhole.models.model import Model
from keyhole.retrieval.gate import SeerGate
from tests.checkpoints import make_model
from tests.oracle import Array, Choice, best, float64, in_order, tokens_of
from tests.policies.models import PROMPTS, prompt, twins, with_head
from tests.policies.recording import (
    GREEDY,
    PAGE,
    check_against,
    check_offloaded,
    check_under_pressure,
    make_engine,
    steps,
)


def gate_beside(model: Model, folder: Path, seed: int = 0) -> dict[str, Array]:
    """A random gate for a model in a folder, and its tensors."""
    SeerGate.random(model.geometry(PAGE), seed).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    return {name: np.asarray(x, np.float64) for name, x in stored.items()}


def pooled(keys: Array, head: int) -> list[Array]:
    """Largest, smallest and mean numbers of the keys of each page of one head, one by one."""
    found = []
    for start in range(0, keys.shape[1], PAGE):
        page = keys[head, start : start + PAGE]
        parts = [[pool(column) for column in page.T] for pool in (np.max, np.min, np.mean)]
        found.append(np.concatenate([np.asarray(part, np.float64) for part in parts]))
    return found


def gate_scores(query: Array, keys: Array, tensors: dict[str, Array], layer: int) -> list[Array]:
    """The paper's equations 1 to 3 without RoPE: for each KV head, a share for every page."""
    of_query, of_key = tensors[f"layers.{layer}.query"], tensors[f"layers.{layer}.key"]
    group = len(query) // len(keys)
    found = []
    for head in range(len(keys)):
        together = np.concatenate(list(query[head * group : (head + 1) * group]))
        gate_query = together @ of_query[head].reshape(len(together), -1)
        gate_keys = [page @ of_key[head] for page in pooled(keys, head)]
        logits = [float(gate_query @ key) / len(gate_query) ** 0.5 for key in gate_keys]
        powers = np.exp(np.asarray(logits) - max(logits))
        found.append(powers / powers.sum())
    return found


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama_group3", {}),
        ("llama_mha", {}),
        ("llama_mqa", {}),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    ],
)
@pytest.mark.parametrize(
    ("settings", "first", "last"),
    [
        ({"token_budget": 12}, 0, 1),
        ({"token_budget": 4, "full_layers": (1,)}, 0, 1),
        ({"token_budget": 23, "sink_size": 5, "window_size": 6}, 2, 2),
    ],
)
def test_a_whole_model_reads_the_pages_that_the_gate_scores_highest(
    kind: str,
    fields: dict[str, Any],
    settings: dict[str, Any],
    first: int,
    last: int,
    tmp_path: Path,
) -> None:
    model, network = twins(kind, num_hidden_layers=4, **fields)
    tensors = gate_beside(model, tmp_path / "gate")
    policy = SeerAttentionR(gate=str(tmp_path / "gate"), **settings)

    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        if layer in policy.full_layers:
            return None
        count = policy.token_budget // PAGE
        pages = [
            best(list(shares), count, first=first, last=last)
            for shares in gate_scores(query, keys, tensors, layer)
        ]
        return pages, [tokens_of(head, PAGE, keys.shape[1]) for head in pages]

    assert check_against(choose, model, network, policy, PROMPTS)


def check_pooled(engine: Engine) -> None:
    """The pooled keys of all pages in use are those of the keys that lie in them."""
    for request in engine.scheduler.running:
        length = request.num_computed
        if not length:
            continue
        pages: Sequence[int] = request.pages[: -(-length // PAGE)]
        for layer in engine.geometry.full_attention:
            keys = in_order(engine.cache.keys[layer], pages, length)
            stored = float64(engine.cache.data[layer]["pooled"][pages])
            wanted = [np.stack(pooled(keys, head)) for head in range(len(keys))]
            assert np.abs(stored - np.stack(wanted, 1)).max() <= 1e-2 * np.abs(stored).max()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("deepseek_v3", "float32")]
)
def test_pooled_keys_are_those_built_from_scratch_at_every_step(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    """Also of generated tokens, shared pages, pages written in parts, and after pre-emption."""
    model, _ = twins(kind, dtype=dtype, num_hidden_layers=3)
    gate_beside(model, tmp_path)
    policy = SeerAttentionR(token_budget=12, gate=str(tmp_path))
    check_under_pressure(model, policy, check_pooled, tokens=20)


@pytest.mark.slow
def test_offloaded_layers_change_nothing(tmp_path: Path) -> None:
    model, _ = twins("llama_group3", num_hidden_layers=4)
    gate_beside(model, tmp_path / "gate")
    policy = SeerAttentionR(token_budget=12, gate=str(tmp_path / "gate"))
    check_offloaded(model, policy, tmp_path)


def test_pooled_keys_are_counted(tmp_path: Path) -> None:
    model, _ = twins("llama", num_hidden_layers=5)
    gate_beside(model, tmp_path)
    policy = SeerAttentionR(token_budget=8, full_layers=(0, 1), gate=str(tmp_path))
    engine = make_engine(model, policy)
    request = engine.add(prompt(11), dataclasses.replace(GREEDY, max_tokens=4))
    for _ in steps(engine):
        pass
    pages = sum(-(-length // PAGE) for length in (12, 13, 14))
    three_keys = 3 * 2 * 8 * 4  # pools, KV heads, head size, bytes of a float32
    assert request.stats().other_bytes_read == 3 * pages * three_keys


def test_the_gate_beside_the_weights_is_used_unless_another_is_named(tmp_path: Path) -> None:
    model = with_head(make_model("llama", tmp_path, num_hidden_layers=2))
    other = tmp_path / "other"
    SeerGate.random(model.geometry(PAGE), seed=1).save_pretrained(other)
    params = dataclasses.replace(GREEDY, max_tokens=12, logprobs=1)
    found = [
        LLM(model, SeerAttentionR(token_budget=8, gate=gate), page_size=PAGE)
        .generate({"prompt_token_ids": prompt(51)}, params)
        .logprobs
        for gate in (None, str(model.gate), str(other))
    ]
    assert found[0] == found[1] != found[2]


def test_a_missing_gate_is_named_with_the_remedy(tmp_path: Path) -> None:
    model, _ = twins("llama", num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"needs a gate.*train-head --objective gate"):
        make_engine(model, SeerAttentionR(token_budget=8))
    with pytest.raises(ModelError, match=r"holds no gate: it has no config.json; train one with"):
        make_engine(model, SeerAttentionR(token_budget=8, gate=str(tmp_path)))

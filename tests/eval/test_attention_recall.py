"""Recall of attention, against the weights that transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keyhole import Delta, Full, Quest, RaaS, SlidingWindow, StreamingLLM
from keyhole.config import EngineConfig
from keyhole.engine.engine import Engine
from keyhole.eval.forced_text import AttentionRecall, Perplexity, WindowedText, recall
from keyhole.models.loading import load
from keyhole.policies.base import Policy
from tests.checkpoints import make_config, make_model, make_network

CONFIG = EngineConfig(max_batch=2, page_size=4, prefill_chunk=40, prefix_cache=False)
LENGTH, STEPS, SAMPLES = 60, 15, 3
#: Shares of float32 weights, whose sums are made in another order than in the oracle.
TOLERANCE = 1e-5
TEXT = "".join(f"{n * n % 89} birds and {n} cats. " for n in range(30))


def measured(kind: str, policy: Policy, folder: Path) -> tuple[dict[str, Any], WindowedText, Any]:
    model = load(make_model(kind, folder, tokenizer=True), device="cpu")
    (folder / "text.txt").write_text(TEXT)
    text = WindowedText(folder / "text.txt", model)
    found = AttentionRecall(text).measure(
        lambda used: Engine(model, used, CONFIG), policy, LENGTH, "prompt", SAMPLES
    )
    return found, text, model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_a_window_finds_what_it_should(kind: str, tmp_path: Path) -> None:
    """With grouped heads; beside layers with windows of their own; with sinks, which are no key."""
    size = 9
    found, text, model = measured(kind, SlidingWindow(token_budget=size), tmp_path)
    network = make_network(make_config(kind))
    layers = model.geometry(4).layers
    wanted = np.zeros((SAMPLES, len(layers)))
    for sample in range(SAMPLES):
        window = torch.tensor([text.window(LENGTH, sample)])
        with torch.no_grad():
            weights = network(window, output_attentions=True).attentions
        for layer, layout in enumerate(layers):
            if layout.window is not None:
                wanted[sample, layer] = 1
                continue
            shares = [
                sum(head[place - size + 1 : place + 1]) / sum(head)
                for place in range(LENGTH - 1 - STEPS, LENGTH - 1)
                for head in weights[layer][0, :, place].double().tolist()
            ]
            wanted[sample, layer] = sum(shares) / len(shares)
    assert found["recall_per_layer"] == pytest.approx(wanted.mean(0).tolist(), abs=TOLERANCE)
    assert found["scores"] == pytest.approx(wanted.mean(1).tolist(), abs=TOLERANCE)
    assert found["score"] == pytest.approx(wanted.mean(), abs=TOLERANCE)
    assert min(found["recall_per_layer"]) < 0.9


@pytest.mark.slow
def test_what_was_evicted_is_not_found(tmp_path: Path) -> None:
    """Nobody looks at a page enough to keep it: the prompt stays, and the two newest pages."""
    prompt, page = LENGTH - 1 - STEPS, CONFIG.page_size
    assert prompt % page == 0
    policy = RaaS(token_budget=prompt + 2 * page, alpha=0.9999, prompt_in_budget=True)
    found, text, _ = measured("llama", policy, tmp_path)
    network = make_network(make_config("llama"))
    wanted = np.zeros((SAMPLES, 4))
    for sample in range(SAMPLES):
        window = torch.tensor([text.window(LENGTH, sample)])
        with torch.no_grad():
            weights = network(window, output_attentions=True).attentions
        for layer in range(4):
            shares = []
            for place in range(prompt, LENGTH - 1):
                begin = max(prompt, (place // page - 1) * page)
                read = [*range(prompt), *range(begin, place + 1)]
                shares += weights[layer][0, :, place].double()[:, read].sum(-1).tolist()
            wanted[sample, layer] = sum(shares) / len(shares)
    assert found["recall_per_layer"] == pytest.approx(wanted.mean(0).tolist(), abs=TOLERANCE)
    assert max(found["recall_per_layer"]) < 0.99


@pytest.mark.slow
def test_who_reads_everything_finds_everything(tmp_path: Path) -> None:
    found, text, model = measured("llama", Full(), tmp_path)
    assert found["recall_per_layer"] == [1, 1, 1, 1]
    plain = Perplexity(text).measure(
        lambda used: Engine(model, used, CONFIG), Full(), LENGTH, "prompt", SAMPLES
    )
    assert found["nlls"] == pytest.approx(plain["nlls"])
    covering = measured("llama", StreamingLLM(token_budget=LENGTH), tmp_path)[0]
    assert covering["recall_per_layer"] == [1, 1, 1, 1]


def test_layers_that_choose_for_others_read_everything(tmp_path: Path) -> None:
    policy = Delta(token_budget=16, full_layers=(0,), delta_layers=(1,))
    recalls = measured("llama", policy, tmp_path)[0]["recall_per_layer"]
    assert recalls[:2] == [1, 1]
    assert all(0 < share < 1 for share in recalls[2:])


@pytest.mark.slow
def test_pages_per_head_and_mla_are_measured(tmp_path: Path) -> None:
    recalls = measured("deepseek_v3", Quest(token_budget=16, full_layers=(0,)), tmp_path)[0]
    assert recalls["recall_per_layer"][0] == 1
    assert all(0 < share < 1 for share in recalls["recall_per_layer"][1:])


@pytest.mark.parametrize("lists", [1, 2, 4])
@pytest.mark.parametrize("unit", [1, 4])
def test_a_share_is_what_a_loop_adds_up(lists: int, unit: int) -> None:
    generator = np.random.default_rng(lists * unit)
    weights = generator.random((4, 18))
    chosen = [sorted(generator.choice(-(-18 // unit), 2 + n, False)) for n in range(lists)]
    indices = np.full((lists, 6), -1, np.int32)
    for row, entries in zip(indices, chosen, strict=True):
        row[: len(entries)] = entries
    shares = []
    for head in range(4):
        entries = chosen[head * lists // 4]
        read = [token for token in range(18) if token // unit in entries]
        shares.append(sum(weights[head, token] for token in read) / sum(weights[head]))
    found = recall(torch.tensor(weights), indices, unit)
    assert found == pytest.approx(sum(shares) / 4)

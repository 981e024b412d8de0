"""The tokens of a prompt that are kept, in a whole model, against the paper's formula."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from keyhole import SnapKV
from tests.oracle import Array, Choice
from tests.policies.models import PROMPTS, prompt, twins
from tests.policies.recording import (
    GREEDY,
    check_against,
    check_offloaded,
    forced,
    make_engine,
    run,
)
from tests.policies.shapes import shape

BUDGET, WINDOW = 12, 3


def ranked(
    query: Array, keys: Array, scale: float, kernel: int, pooling: str, lists: int
) -> list[list[int]]:
    """The kept tokens of a prompt per list, best first: query [Hq, n, D], keys [Hkv, n, D]."""
    length, shared = keys.shape[1], len(query) // len(keys)
    window = min(WINDOW, length)
    found = []
    for one in range(lists):
        heads = range(one * len(query) // lists, (one + 1) * len(query) // lists)
        received = np.zeros(length - window)
        for head in heads:
            for row in range(length - window, length):
                logits = scale * keys[head // shared, : row + 1] @ query[head, row]
                weights = np.exp(logits - logits.max())
                received += (weights / weights.sum())[: length - window] / len(heads)
        half = kernel // 2
        near = [received[max(0, i - half) : i + half + 1] for i in range(len(received))]
        scores = [x.max() if pooling == "max" else x.sum() / kernel for x in near]
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        found.append([*range(length - 1, length - window - 1, -1), *order][:BUDGET])
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("counted", [False, True], ids=["beside", "counted"])
@pytest.mark.parametrize(
    ("kind", "fields", "settings"),
    [
        ("llama_group3", {}, {}),
        ("llama_group3", {}, {"full_layers": (1,), "pooling": "max", "kernel_size": 7}),
        ("llama_mqa", {}, {"kernel_size": 1}),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"]}, {}),
        ("deepseek_v3", {}, {}),
    ],
)
def test_a_whole_model_keeps_what_the_last_tokens_attend_to(
    kind: str, fields: dict[str, Any], settings: dict[str, Any], counted: bool
) -> None:
    """Ragged prompts in chunks: what each KV head keeps is the formula's, and is final."""
    model, network = twins(kind, num_hidden_layers=2, **fields)
    given: dict[int, tuple[Array, Array, float]] = {}

    def watch(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> None:
        given[layer] = query, keys, options["scale"]

    def choose(layer: int, _: Array, keys: Array, __: dict[str, Any]) -> Choice:
        length = keys.shape[1]
        if layer in settings.get("full_layers", ()) or length <= BUDGET:
            return None
        start = max(len(one) for one in PROMPTS if len(one) < length)
        query, all_keys, scale = given[layer]
        kernel, pooling = settings.get("kernel_size", 5), settings.get("pooling", "avg")
        # Latents are shared by all heads, and so is what they keep.
        count = 1 if kind == "deepseek_v3" else len(all_keys)
        kept = ranked(query[:, :start], all_keys[:, :start], scale, kernel, pooling, count)
        generated = list(range(start, length))
        if counted:
            generated = generated[-BUDGET:]
            kept = [tokens[: BUDGET - len(generated)] for tokens in kept]
        lists = [sorted(tokens) + generated for tokens in kept]
        return lists, lists

    policy = SnapKV(
        token_budget=BUDGET, observation_window=WINDOW, generated_in_budget=counted, **settings
    )
    assert check_against(choose, model, network, policy, PROMPTS, watch=watch)


def test_a_prompt_that_the_budget_holds_is_read_in_full() -> None:
    """Whatever is generated after it, as generated tokens are outside the budget."""
    model, _ = twins("llama_group3", num_hidden_layers=2)
    logits = []
    for policy in (None, SnapKV(token_budget=BUDGET, observation_window=WINDOW)):
        engine = make_engine(model, policy)
        request = forced(engine, prompt(BUDGET), prompt(20))
        run(engine)
        logits.append(torch.stack(request.logits))
    assert (logits[0] - logits[1]).abs().max() <= 1e-5


def test_a_window_over_two_chunks_and_a_cached_prefix_is_observed_whole() -> None:
    """A chunk of one token, and a cached prefix whose last tokens' queries are not stored."""
    model, _ = twins("llama_group3", num_hidden_layers=2)
    policy = SnapKV(token_budget=BUDGET, observation_window=WINDOW)
    text = prompt(33)
    found = []
    for chunk, times in ((64, 1), (16, 1), (64, 2)):
        engine = make_engine(model, policy, prefill_chunk=chunk)
        for _ in range(times):
            request = forced(engine, text, prompt(9))
            run(engine)
        found.append(torch.stack(request.logits))
    assert request.stats().cached_prompt_tokens == 28
    assert all((one - found[0]).abs().max() <= 1e-4 for one in found)


def test_offloaded_layers_change_nothing(tmp_path: Any) -> None:
    model, _ = twins("llama_group3", num_hidden_layers=4)
    policy = SnapKV(
        token_budget=24, observation_window=4, generated_in_budget=True, full_layers=(0,)
    )
    check_offloaded(model, policy, tmp_path)


def test_reads_are_saved_and_counted() -> None:
    model, _ = twins("llama_group3", num_hidden_layers=2)
    engine = make_engine(model, SnapKV(token_budget=BUDGET, observation_window=WINDOW))
    request = engine.add(prompt(60), dataclasses.replace(GREEDY, max_tokens=2))
    run(engine)
    assert request.stats().attended_fraction == pytest.approx((BUDGET + 1) / 61)


def test_the_window_is_a_quarter_of_a_small_budget() -> None:
    assert SnapKV(token_budget=40).resolve(shape(4)).observation_window == 10
    assert SnapKV().resolve(shape(4)).observation_window == 32

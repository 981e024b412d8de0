"""Pages of the highest bound per KV head, in a whole model, and bounds that stay true."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keyhole import ConfigError, Quest
from keyhole.engine.engine import Engine
from tests.oracle import Array, Choice, best, bound, bounds, float64, in_order, tokens_of
from tests.policies.models import PROMPTS, prompt, twins
from tests.policies.recording import (
    GREEDY,
    PAGE,
    check_against,
    check_under_pressure,
    make_engine,
    steps,
)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama_group3", {}),
        ("llama_mha", {}),
        ("llama_mqa", {}),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 4}),
    ],
)
@pytest.mark.parametrize(("budget", "full"), [(12, (0, 1)), (4, (0, 1)), (23, ())])
def test_a_whole_model_reads_the_pages_of_the_highest_bound(
    kind: str, fields: dict[str, Any], budget: int, full: tuple[int, ...]
) -> None:
    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        if layer in full:
            return None
        scores = bound(query, *bounds(keys, PAGE))
        pages = [best(head, budget // PAGE, last=1) for head in scores]
        return pages, [tokens_of(head, PAGE, keys.shape[1]) for head in pages]

    policy = Quest(token_budget=budget, full_layers=full)
    model, network = twins(kind, num_hidden_layers=len(fields.get("layer_types", "four")), **fields)
    assert check_against(choose, model, network, policy, PROMPTS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama_group3", {}),
        ("llama_mqa", {}),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ],
)
def test_each_query_head_reads_the_pages_of_its_own_bound(
    kind: str, fields: dict[str, Any]
) -> None:
    """As the authors select; with learned sinks (gpt_oss)."""

    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        if layer == 0:
            return None
        scores = bound(query, *bounds(keys, PAGE), share=False)
        pages = [best(head, 3, last=1) for head in scores]
        return pages, [tokens_of(head, PAGE, keys.shape[1]) for head in pages]

    policy = Quest(token_budget=12, full_layers=(0,), share_group=False)
    model, network = twins(kind, num_hidden_layers=4, **fields)
    if kind == "gpt_oss":
        policy = dataclasses.replace(policy, full_layers=())
        wanted = choose

        def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
            return wanted(layer + 1, query, keys, options)

    assert check_against(choose, model, network, policy, PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("sink", "window"), [(5, 6), (1, None), (0, 12)])
def test_sinks_and_window_are_whole_pages_within_the_budget(
    share: bool, sink: int, window: int | None
) -> None:
    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        if layer < 2:
            return None
        scores = bound(query, *bounds(keys, PAGE), share=share)
        first, last = -(-sink // PAGE), -(-(window or 1) // PAGE)
        pages = [best(head, 5, first=first, last=last) for head in scores]
        return pages, [tokens_of(head, PAGE, keys.shape[1]) for head in pages]

    policy = Quest(token_budget=20, sink_size=sink, window_size=window, share_group=share)
    model, network = twins("llama_group3", num_hidden_layers=4)
    assert check_against(choose, model, network, policy, PROMPTS)


def test_a_list_per_query_head_is_counted_per_query_head() -> None:
    """Bytes are those of a kernel that shares nothing between the heads of a group."""
    model, _ = twins("llama_group3", num_hidden_layers=4)
    geometry = model.geometry(PAGE)
    read = []
    for share in (True, False):
        policy = Quest(token_budget=8, full_layers=(), share_group=share)
        engine = make_engine(model, policy)
        request = engine.add(prompt(21), dataclasses.replace(GREEDY, max_tokens=2))
        for _ in steps(engine):
            pass
        read.append(request.stats().kv_bytes_read)
    group = geometry.num_query_heads // geometry.layers[0].num_kv_heads
    assert read[1] == group * read[0]


def test_a_lower_tier_needs_one_list_per_kv_head(tmp_path: Path) -> None:
    model, _ = twins("llama_group3", num_hidden_layers=4)
    policy = Quest(token_budget=8, share_group=False)
    with pytest.raises(ConfigError, match="'quest' with offload= needs share_group=True"):
        make_engine(model, policy, offload=str(tmp_path / "below"), memory="64KiB")


def check_bounds(engine: Engine) -> None:
    """The bounds of all pages in use equal those of the keys that lie in them."""
    for request in engine.scheduler.running:
        length = request.num_computed
        if not length:
            continue
        pages = request.pages[: -(-length // PAGE)]
        for layer in engine.geometry.full_attention:
            data = engine.cache.data[layer]
            keys = in_order(engine.cache.keys[layer], pages, length)
            for name, wanted in zip(("low", "high"), bounds(keys, PAGE), strict=True):
                assert np.array_equal(float64(data[name][pages].transpose(0, 1)), wanted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("deepseek_v3", "float32")]
)
def test_bounds_are_those_built_from_scratch_at_every_step(kind: str, dtype: str) -> None:
    """Also of generated tokens, shared pages, pages written in parts, and after pre-emption."""
    model, _ = twins(kind, dtype=dtype, num_hidden_layers=3)
    policy = Quest(token_budget=12)
    check_under_pressure(model, policy, check_bounds, tokens=20)


def test_the_first_two_layers_are_full_unless_said() -> None:
    assert Quest().full_layers == (0, 1)


def test_summaries_are_counted() -> None:
    model, _ = twins("llama", num_hidden_layers=5)
    engine = make_engine(model, Quest(token_budget=8))
    params = dataclasses.replace(GREEDY, max_tokens=4)
    request = engine.add(prompt(11), params)
    for _ in steps(engine):
        pass
    pages = sum(-(-length // PAGE) for length in (12, 13, 14))
    two_keys = 2 * 2 * 8 * 4  # low and high, KV heads, head size, bytes of a float32
    assert request.stats().other_bytes_read == 3 * pages * two_keys


def test_summaries_are_part_of_the_memory() -> None:
    model, _ = twins("gemma3", layer_types=["sliding_attention", "full_attention"] * 4)
    engine = make_engine(model, Quest(token_budget=8))
    engine.cache.allocate(1)
    cache = engine.cache
    tensors = [*cache.keys, *cache.values, *(t for data in cache.data for t in data.values())]
    assert len(tensors) == 8 + 8 + 2 * 4
    assert sum(t.nbytes for t in tensors) == cache.capacity * cache.page_bytes

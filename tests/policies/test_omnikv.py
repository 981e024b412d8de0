"""Filter layers choose one list of tokens for the layers after them, in a whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from keyhole import ConfigError, OmniKV
from keyhole.policies.omnikv import default_filter_layers
from tests.oracle import Array, Choice, Choose, attention, best, visible
from tests.policies.models import PROMPTS, twins
from tests.policies.recording import (
    GREEDY,
    PAGE,
    Recording,
    check_against,
    forced,
    make_engine,
    run,
    steps,
)
from tests.policies.shapes import shape


def formula(
    full: set[int],
    filters: set[int],
    budget: int,
    *,
    sink: int = 0,
    window: int | None = None,
    prompts: Sequence[int] | None = None,
    count: int = 12,
) -> Choose:
    """OmniKV as the paper has it, over prompt and generated tokens alike.

    prompts: lengths of prompts, up to `count` tokens apart, if a filter looks at these alone, by
    its softmax over them, and all tokens after them are read too (the authors' code).
    """
    chosen: dict[int, tuple[int, list[int]]] = {}  # length -> filter layer, its tokens

    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        length = keys.shape[1]
        if layer in filters:
            ends = [n for n in prompts or () if 0 < length - n < count]
            end = ends[0] if prompts else length
            seen = [visible(end)] * len(keys)
            _, weights = attention(query, keys, keys, seen, **options)
            if prompts:  # a sink of the softmax has no part in it
                weights = weights / weights.sum(axis=1, keepdims=True)
            scores = [max(float(row[i]) for row in weights) for i in range(end)]
            last = (0 if prompts else 1) if window is None else window
            tokens = best(scores, budget, first=sink, last=last)
            chosen[length] = layer, tokens + list(range(end, length))
        before = [i for i in filters if i < layer]
        if layer in full | filters or not before:
            return None
        source, tokens = chosen[length]
        assert source == max(before)
        return [tokens], [tokens]

    return choose


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("kind", "fields", "filters"),
    [
        ("llama_group3", {}, (2, 4, 6)),
        ("llama_mha", {}, (2, 4, 6)),
        ("llama_mqa", {}, (2, 4, 6)),
        ("gemma2", {"layer_types": ["full_attention"] * 8}, (2, 4, 6)),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 6},
            (2, 4, 6),
        ),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 4}, (1, 3, 5)),
        ("deepseek_v3", {}, (2, 4, 6)),
    ],
)
def test_a_whole_model_reads_the_tokens_of_the_filter_before(
    kind: str, fields: dict[str, Any], filters: tuple[int, ...]
) -> None:
    """With default layers; weights pass through softcaps (gemma2) and sinks (gpt_oss)."""
    model, network = twins(kind, **fields)
    policy = OmniKV(token_budget=11)
    assert check_against(formula({0, 1}, set(filters), 11), model, network, policy, PROMPTS)
    assert policy.resolve(model.geometry(PAGE)).filter_layers == filters


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("full", "filters", "budget"),
    [((), (0, 3), 5), ((0, 1, 3), (2,), 1), ((0, 5), (4, 2), 16), ((), (7,), 4)],
)
def test_any_layers_and_any_budget(
    full: tuple[int, ...], filters: tuple[int, ...], budget: int
) -> None:
    """One token is the newest."""
    model, network = twins("llama_group3")
    policy = OmniKV(token_budget=budget, full_layers=full, filter_layers=filters, dense_after=0)
    choose = formula(set(full), set(filters), budget)
    narrow = check_against(choose, model, network, policy, PROMPTS)
    assert bool(narrow) == (filters != (7,))


LENGTHS = [len(prompt) for prompt in PROMPTS]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", ["llama_group3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(("sink", "window"), [(0, None), (2, 5)])
def test_all_generated_tokens_may_be_read_outside_the_budget(
    kind: str, sink: int, window: int | None
) -> None:
    """As in the authors' code: a filter chooses among the prompt's tokens, by their softmax."""
    fields: dict[str, Any] = {}
    if kind == "gpt_oss":
        fields = {"layer_types": ["full_attention"] * 7 + ["sliding_attention"]}
    model, network = twins(kind, **fields)
    policy = OmniKV(token_budget=7, keep_generated=True, sink_size=sink, window_size=window)
    filters = set(policy.resolve(model.geometry(PAGE)).filter_layers or ())
    choose = formula({0, 1}, filters, 7, sink=sink, window=window, prompts=LENGTHS)
    assert check_against(choose, model, network, policy, PROMPTS)


def test_kept_tokens_stay_those_after_the_prompt_through_preemption() -> None:
    model, _ = twins("llama_group3")
    policy = OmniKV(token_budget=7, keep_generated=True)
    params = dataclasses.replace(GREEDY, max_tokens=20)
    probe = make_engine(model, policy)
    alone = []
    for text in PROMPTS[1:]:
        engine = make_engine(model, policy)
        alone.append(engine.add(text, params, keep_logits=True))
        run(engine)
    engine = make_engine(model, policy, memory=32 * probe.cache.page_bytes)
    together = [engine.add(text, params, keep_logits=True) for text in PROMPTS[1:]]
    preempted = 0
    for _ in steps(engine):
        preempted += any(request.generated for request in engine.scheduler.waiting)
    assert preempted
    for one, other in zip(alone, together, strict=True):
        assert one.generated == other.generated
        assert (torch.stack(one.logits) - torch.stack(other.logits)).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"dense_after": 1}, {0, 1, 2, 3, 4, 5, 6, 7}),
        ({"dense_after": 1, "filter_layers": (2,)}, {0, 1, 2, 3}),
        ({"dense_after": 2, "filter_layers": (0, 4), "full_layers": ()}, {0, 1, 2, 4, 5, 6}),
        ({"dense_after": 0, "filter_layers": (2, 4)}, {0, 1, 2, 4}),
        ({"filter_layers": (2, 5)}, {0, 1, 2, 3, 5, 6}),
    ],
)
def test_layers_after_a_filter_may_read_everything(
    settings: dict[str, Any], wanted: set[int]
) -> None:
    """By default one, as the authors have it, to leave copies time to arrive."""
    model, network = twins("llama_group3")
    policy = OmniKV(token_budget=9, **settings)
    geometry = model.geometry(PAGE)
    resolved = policy.resolve(geometry)
    assert set(resolved.dense_layers(geometry)) == wanted
    filters = set(resolved.filter_layers or ())
    narrow = check_against(formula(wanted - filters, filters, 9), model, network, policy, PROMPTS)
    assert bool(narrow) == (len(wanted) < 8)


def test_layers_after_a_filter_are_those_with_full_attention() -> None:
    geometry = shape(26, full=(5, 11, 17, 23))
    policy = OmniKV(filter_layers=(5,)).resolve(geometry)
    assert policy.dense_layers(geometry) == (5, 11)


@pytest.mark.parametrize(("num_layers", "after"), [(6, 0), (8, 0), (9, 1), (32, 1)])
def test_no_layer_after_a_filter_is_dense_where_none_would_be_left(
    num_layers: int, after: int
) -> None:
    policy = OmniKV().resolve(shape(num_layers))
    assert policy.dense_after == after
    assert len(policy.dense_layers(shape(num_layers))) < num_layers


def test_offloading_is_refused_if_all_generated_tokens_are_kept() -> None:
    policy = OmniKV(keep_generated=True).resolve(shape(9))
    assert policy.outside_budget() == "all generated tokens"
    with pytest.raises(ConfigError, match="offload= needs keep_generated=False"):
        policy.offloadable(shape(9))


@pytest.mark.slow
@pytest.mark.parametrize(("sink", "window"), [(3, None), (0, 5), (2, 9)])
def test_sinks_and_window_are_within_the_budget(sink: int, window: int | None) -> None:
    model, network = twins("llama_group3")
    policy = OmniKV(token_budget=11, sink_size=sink, window_size=window)
    choose = formula({0, 1}, {2, 4, 6}, 11, sink=sink, window=window)
    assert check_against(choose, model, network, policy, PROMPTS)


@pytest.mark.slow
def test_generated_tokens_are_chosen_among() -> None:
    """Some are read after the window of an always-read tail has passed, and some are not."""
    model, _ = twins("llama_group3")
    recording = Recording(inner=OmniKV(token_budget=12))
    engine = make_engine(model, recording)
    prompt, given = PROMPTS[1], PROMPTS[2]
    forced(engine, prompt, given)
    run(engine)
    read = [
        len([token for token in lists[0] if token >= len(prompt)])
        for call in recording.calls
        if call.layer == 7 and (lists := call.entries(0)) is not None
    ]
    assert max(read) > 1
    assert read[-1] < len(given)


@pytest.mark.parametrize(
    ("num_layers", "wanted"),
    [(1, (0,)), (2, (1,)), (4, (2,)), (5, (2, 4)), (8, (2, 4, 6)), (32, (2, 8, 18))],
)
def test_filter_layers_scale_with_the_depth(num_layers: int, wanted: tuple[int, ...]) -> None:
    assert default_filter_layers(shape(num_layers)) == wanted


def test_filter_layers_are_full_attention_layers() -> None:
    assert default_filter_layers(shape(26, full=(5, 11, 17, 23))) == (5, 17)
    assert default_filter_layers(shape(4, full=())) == ()


def test_layers_that_filters_serve_may_live_on_a_lower_tier() -> None:
    geometry = shape(9)
    policy = OmniKV(full_layers=(0, 1, 3), filter_layers=(2, 5), dense_after=0).resolve(geometry)
    assert policy.offloadable(geometry) == (4, 6, 7, 8)

"""Filter layers choose one list of tokens for the layers after them, in a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keyhole import ConfigError, OmniKV
from keyhole.policy.omnikv import default_filter_layers
from tests.oracle import Array, Choice, Choose, attention, best, visible
from tests.policy.models import PROMPTS, twins
from tests.policy.recording import PAGE, Recording, check_against, forced, make_engine, run
from tests.policy.shapes import shape


def formula(full: set[int], filters: set[int], budget: int) -> Choose:
    """OmniKV as the paper has it, over prompt and generated tokens alike."""
    chosen: dict[int, tuple[int, list[int]]] = {}  # length -> filter layer, its tokens

    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        length = keys.shape[1]
        if layer in filters:
            everything = [visible(length)] * len(keys)
            _, weights = attention(query, keys, keys, everything, **options)
            scores = [max(float(row[i]) for row in weights) for i in range(length)]
            chosen[length] = layer, best(scores, budget, last=1)
        before = [i for i in filters if i < layer]
        if layer in full | filters or not before:
            return None
        source, tokens = chosen[length]
        assert source == max(before)
        return [tokens], [tokens]

    return choose


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
    tmp_path: Path, kind: str, fields: dict[str, Any], filters: tuple[int, ...]
) -> None:
    """With default layers; weights pass through softcaps (gemma2) and sinks (gpt_oss)."""
    model, network = twins(kind, tmp_path, **fields)
    policy = OmniKV(token_budget=11)
    assert check_against(formula({0, 1}, set(filters), 11), model, network, policy, PROMPTS)
    assert policy.resolve(model.geometry(PAGE)).filter_layers == filters


@pytest.mark.parametrize(
    ("full", "filters", "budget"),
    [((), (0, 3), 5), ((0, 1, 3), (2,), 1), ((0, 99), (4, 2), 16), ((), (7,), 4)],
)
def test_any_layers_and_any_budget(
    tmp_path: Path, full: tuple[int, ...], filters: tuple[int, ...], budget: int
) -> None:
    """The layer after a filter may be full, as the authors have it; one token is the newest."""
    model, network = twins("llama_group3", tmp_path)
    policy = OmniKV(token_budget=budget, full_layers=full, filter_layers=filters)
    choose = formula(set(full), set(filters), budget)
    narrow = check_against(choose, model, network, policy, PROMPTS)
    assert bool(narrow) == (filters != (7,))


def test_generated_tokens_are_chosen_among(tmp_path: Path) -> None:
    """Some are read after the window of an always-read tail has passed, and some are not."""
    model, _ = twins("llama_group3", tmp_path)
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
    policy = OmniKV(full_layers=(0, 1, 3), filter_layers=(2, 5)).resolve(geometry)
    assert policy.offloadable(geometry) == (4, 6, 7, 8)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"token_budget": 0}, "token_budget 0 must be at least 1"),
        ({"filter_layers": (28,)}, "filter_layers"),
        ({"filter_layers": ("x",)}, "filter_layers"),
        ({"full_layers": (-1,)}, "full_layers"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        OmniKV(**settings).resolve(shape(28))


def test_a_sliding_layer_cannot_choose() -> None:
    with pytest.raises(ConfigError, match=r"filter_layers \(4,\) must be full-attention layers"):
        OmniKV(filter_layers=(4,)).resolve(shape(8, full=(1, 3, 5, 7)))

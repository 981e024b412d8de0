"""Two layers choose tokens per KV head for those after them, in a whole model."""

from __future__ import annotations

from typing import Any

import pytest

from keyhole import ConfigError, TidalDecode
from keyhole.cache.layout import Geometry
from keyhole.policies.tidal_decode import default_selection_layers
from tests.oracle import Array, Choice, Choose, attention, best, visible
from tests.policies.models import PROMPTS, twins
from tests.policies.recording import PAGE, Recording, check_against, forced, make_engine, run
from tests.policies.shapes import shape


def formula(
    full: set[int],
    selecting: set[int],
    budget: int,
    *,
    latent: bool = False,
    share: bool = True,
    sink: int = 0,
    window: int = 1,
) -> Choose:
    """TidalDecode as the paper has it, with the largest weight of each group of heads.

    latent: all heads are one group, which shares its latents. share: False for each query head's
    own choice, as the authors' code makes it. sink, window: tokens that are always read.
    """
    chosen: dict[int, tuple[int, list[list[int]]]] = {}  # length -> selection layer, its tokens

    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        length = keys.shape[1]
        if layer in selecting:
            everything = [visible(length)] * len(keys)
            _, weights = attention(query, keys, keys, everything, **options)
            lists = 1 if latent else len(keys)
            lists = lists if share else len(query)
            group = len(query) // lists
            tokens = []
            for head in range(lists):
                rows = weights[head * group : (head + 1) * group]
                scores = [max(float(row[i]) for row in rows) for i in range(length)]
                tokens.append(best(scores, budget, first=sink, last=window))
            chosen[length] = layer, tokens
        before = [i for i in selecting if i < layer]
        if layer in full | selecting or not before:
            return None
        source, tokens = chosen[length]
        assert source == max(before)
        return tokens, tokens

    return choose


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("kind", "fields", "selecting"),
    [
        ("llama_group3", {}, (2, 4)),
        ("llama_mha", {}, (2, 4)),
        ("llama_mqa", {}, (2, 4)),
        ("gemma2", {"layer_types": ["full_attention"] * 8}, (2, 4)),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 6},
            (2, 4),
        ),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 4}, (1, 3)),
        ("deepseek_v3", {}, (2, 4)),
    ],
)
def test_a_whole_model_reads_the_tokens_of_the_selection_layer_before(
    kind: str, fields: dict[str, Any], selecting: tuple[int, ...]
) -> None:
    """With default layers; weights pass through softcaps (gemma2) and sinks (gpt_oss)."""
    model, network = twins(kind, **fields)
    policy = TidalDecode(token_budget=11)
    choose = formula({0, 1}, set(selecting), 11, latent=kind == "deepseek_v3")
    assert check_against(choose, model, network, policy, PROMPTS)
    assert policy.resolve(model.geometry(PAGE)).selection_layers == selecting


@pytest.mark.slow
@pytest.mark.parametrize(
    ("full", "selecting", "budget"),
    [((), (0, 3), 5), ((0, 1, 5), (2,), 1), ((0, 6), (4, 2), 16), ((), (7,), 4)],
)
def test_any_layers_and_any_budget(
    full: tuple[int, ...], selecting: tuple[int, ...], budget: int
) -> None:
    """Layers before the first selection layer are full; one token is the newest."""
    model, network = twins("llama_group3")
    policy = TidalDecode(token_budget=budget, full_layers=full, selection_layers=selecting)
    choose = formula(set(full), set(selecting), budget)
    narrow = check_against(choose, model, network, policy, PROMPTS)
    assert bool(narrow) == (selecting != (7,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama_group3", {}),
        ("llama_mqa", {}),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 6},
        ),
        ("deepseek_v3", {}),
    ],
)
def test_each_query_head_reads_its_own_tokens(kind: str, fields: dict[str, Any]) -> None:
    """As the authors select; with learned sinks (gpt_oss), and over shared latents."""
    model, network = twins(kind, **fields)
    policy = TidalDecode(token_budget=9, share_group=False)
    assert check_against(formula({0, 1}, {2, 4}, 9, share=False), model, network, policy, PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("sink", "window"), [(3, None), (0, 5), (2, 9)])
def test_sinks_and_window_are_within_the_budget(share: bool, sink: int, window: int | None) -> None:
    model, network = twins("llama_group3")
    policy = TidalDecode(token_budget=11, sink_size=sink, window_size=window, share_group=share)
    choose = formula({0, 1}, {2, 4}, 11, share=share, sink=sink, window=window or 1)
    assert check_against(choose, model, network, policy, PROMPTS)


def test_a_lower_tier_needs_one_list_per_kv_head() -> None:
    policy = TidalDecode(share_group=False).resolve(shape(9))
    with pytest.raises(ConfigError, match="'tidal_decode' with offload= needs share_group=True"):
        policy.offloadable(shape(9))


def test_heads_choose_for_themselves_and_anew_at_every_token() -> None:
    model, _ = twins("llama_group3")
    recording = Recording(inner=TidalDecode(token_budget=12))
    engine = make_engine(model, recording)
    forced(engine, PROMPTS[2], PROMPTS[1])
    run(engine)
    choices = [call.entries(0) for call in recording.calls if call.layer == 7]
    assert any(first != second for first, second in filter(None, choices))
    assert len(set(map(str, choices))) > len(choices) // 2


@pytest.mark.parametrize(
    ("num_layers", "wanted"),
    [(1, (0,)), (2, (1,)), (4, (2,)), (5, (2, 4)), (8, (2, 4)), (28, (2, 11)), (32, (2, 13))],
)
def test_selection_layers_scale_with_the_depth(num_layers: int, wanted: tuple[int, ...]) -> None:
    assert default_selection_layers(shape(num_layers)) == wanted


def test_selection_layers_are_full_attention_layers() -> None:
    assert default_selection_layers(shape(26, full=(5, 11, 17, 23))) == (5, 11)
    assert default_selection_layers(shape(4, full=())) == ()


def test_layers_between_may_live_on_a_lower_tier() -> None:
    geometry: Geometry = shape(9)
    policy = TidalDecode(full_layers=(0, 1, 6), selection_layers=(2, 5)).resolve(geometry)
    assert policy.offloadable(geometry) == (3, 4, 7, 8)

"""Layers over several devices; two names of the CPU stand in for two GPUs (`conftest`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from keyhole import LLM, CapacityError, ConfigError, SamplingParams
from keyhole.models import device_map
from keyhole.models.batch import Batch
from keyhole.models.device_map import spread
from keyhole.models.loading import load
from keyhole.models.model import decoder_layers
from keyhole.models.shrink import random_model, shrink
from keyhole.retrieval.draft import DRAFT_FOLDER
from tests.checkpoints import make_model
from tests.models.conftest import HOME, OTHER, SPLIT, Places
from tests.retrieval.drafts import make_draft

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LOGPROBS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3)
PROMPTS = [list(range(3, 60)), [7, 8, 9], list(range(40, 3, -1))]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            made[kind] = make_model(kind, path, num_hidden_layers=4)
        return made[kind]

    return folder


def logits_of(llm: LLM) -> list[Tensor]:
    """After each prompt and generated token, of ragged prompts in chunks."""
    engine = llm.engine
    sequences = [engine.add(prompt, GREEDY, keep_logits=True) for prompt in PROMPTS]
    while engine.has_work:
        engine.step()
    return [torch.stack(list(sequence.logits)) for sequence in sequences]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("policy", ["full", "quest:token_budget=32", "delta:token_budget=32"])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "gemma3"])
def test_two_devices_compute_what_one_does(
    make: Callable[[str], str], places: Places, kind: str, policy: str
) -> None:
    settings = {"prefill_chunk": 16, "page_size": 8}
    wanted = logits_of(LLM(make(kind), policy, device="cpu", **settings))
    assert places.sent == 0
    split = LLM(make(kind), policy, device_map=SPLIT, **settings)
    assert split.engine.model.layer_devices == (HOME, OTHER, OTHER, HOME)
    found = logits_of(split)
    assert places.sent > 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["opt", "mpt", "dbrx", "llama4_text", "longcat_flash"])
def test_layers_are_found_under_the_name_of_the_family(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Where they were neither `layers` nor `h`: AttributeError, and no hidden states for drafts.

    LongCat has two layers of attention in each: an IndexError.
    """
    heads = {"kv_n_heads": 4, "rope_theta": 5e5, "clip_qkv": 2}  # its default config is no model
    given = {"attn_config": heads} if family == "dbrx" else {}
    network = random_model(shrink(CONFIG_MAPPING[family](**given)))
    network.save_pretrained(tmp_path)
    prefix, blocks = decoder_layers(network)
    wanted = logits_of(LLM(tmp_path, device="cpu", page_size=8))
    llm = LLM(tmp_path, device_map={"": "cpu:0", f"{prefix}.1": "cpu:1"}, page_size=8)
    hidden: list[Any] = []
    gather = Batch.gather
    monkeypatch.setattr(Batch, "gather", lambda b: (gather(b), hidden.append(b.hidden)))
    llm.engine.model.watch((0, len(blocks) - 1))
    found = logits_of(llm)
    assert places.sent > 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert {*hidden[0]} == {0, len(blocks) - 1}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "memory"), [("full", None), ("quest:token_budget=32", "8MiB")])
def test_a_layer_with_attention_twice_is_on_one_device(
    places: Places, tmp_path: Path, policy: str, memory: str | None
) -> None:
    """LongCat has half as many decoder layers as caches: IndexError."""
    random_model(shrink(CONFIG_MAPPING["longcat_flash"]())).save_pretrained(tmp_path)
    settings = {"page_size": 8, "prefill_chunk": 16}
    wanted = logits_of(LLM(tmp_path, policy, device="cpu", **settings))
    given = {"": "cpu:0", "model.layers.1": "cpu:1"}
    llm = LLM(tmp_path, policy, device_map=given, memory=memory, **settings)
    assert llm.engine.cache.layer_devices == (HOME, HOME, OTHER, OTHER)
    found = logits_of(llm)
    assert places.sent > 0
    # Products of MKL depend on where their operands lie in memory, unless MKL_CBWR is set: on AMD's
    # processors the last bit of these differs, as an expert's rows lie elsewhere.
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "family", [pytest.param("gemma3n_text", marks=pytest.mark.slow), "gemma4_text"]
)
def test_keys_of_an_earlier_layer_are_sent(places: Places, tmp_path: Path, family: str) -> None:
    """They stayed on the device of the layer that had made them."""
    config = CONFIG_MAPPING[family](num_kv_shared_layers=10)
    random_model(shrink(config)).save_pretrained(tmp_path)
    last = f"model.layers.{shrink(config).num_hidden_layers - 1}"
    wanted = logits_of(LLM(tmp_path, device="cpu", page_size=8))
    found = logits_of(LLM(tmp_path, device_map={"": "cpu:0", last: "cpu:1"}, page_size=8))
    assert places.sent > 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("family", ["jamba", "qwen3_next", "falcon_h1"])
def test_recurrent_layers_are_refused(tmp_path: Path, family: str) -> None:
    """Their state stayed on the first device, and keys were taken for those of other layers."""
    random_model(shrink(CONFIG_MAPPING[family]())).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"device_map cannot be used with .* recurrent layers"):
        LLM(tmp_path, device_map={"": "cpu:0", "model.layers.1": "cpu:1"})


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "quest:token_budget=32", "delta:token_budget=32"])
@pytest.mark.parametrize("draft", ["ngram", "eagle3"])
def test_proposed_tokens_are_checked_on_two_devices(
    places: Places, tmp_path: Path, draft: str, policy: str
) -> None:
    """The draft model reads hidden states of layers on both devices."""
    path = make_model("llama", tmp_path, num_hidden_layers=4)
    sizes = {"max_position_embeddings": 512, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    made = make_draft(tmp_path, **sizes)
    made.rename(Path(path) / DRAFT_FOLDER)
    settings = {"prefill_chunk": 16, "page_size": 8, "draft": draft, "num_draft_tokens": 3}
    wanted = logits_of(LLM(path, policy, device="cpu", **settings))
    assert places.sent == 0
    split = LLM(path, policy, device_map=SPLIT, **settings)
    found = logits_of(split)
    assert places.sent > 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert split.generate([7, 8, 9] * 9, GREEDY).stats.acceptance_rate is not None


def test_the_cache_of_a_layer_is_on_its_device(make: Callable[[str], str]) -> None:
    cache = LLM(make("llama"), device_map=SPLIT).engine.cache
    assert cache.layer_devices == (HOME, OTHER, OTHER, HOME)
    assert cache.device == HOME


def test_a_prefix_is_shared_across_devices(make: Callable[[str], str]) -> None:
    llm = LLM(make("llama"), device_map=SPLIT, page_size=8)
    first = llm.generate(PROMPTS[0], GREEDY)
    again = llm.generate(PROMPTS[0], GREEDY)
    assert again.token_ids == first.token_ids
    assert again.stats.cached_prompt_tokens > 0


def test_one_device_in_a_map_is_that_device(make: Callable[[str], str]) -> None:
    model = load(make("llama"), device_map={"": "cpu"})
    assert model.layer_devices is None
    assert model.device == torch.device("cpu")


def test_auto_fills_devices_evenly(
    make: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_map, "wanted_devices", lambda _: [HOME, OTHER])
    monkeypatch.setattr(device_map, "free_bytes", lambda _: 1 << 30)
    model = load(make("llama"), device_map="auto")
    assert model.device == HOME
    assert model.layer_devices is not None
    assert {*model.layer_devices} == {HOME, OTHER}
    assert list(model.layer_devices) == sorted(model.layer_devices, key=str)


def test_a_model_larger_than_all_devices_is_refused_with_what_it_needs(
    make: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need = sum(p.nbytes for p in load(make("llama"), "cpu").network.parameters())
    monkeypatch.setattr(device_map, "wanted_devices", lambda _: [HOME, OTHER])
    monkeypatch.setattr(device_map, "free_bytes", lambda _: need // 3)
    with pytest.raises(CapacityError, match=rf"need {need:,} bytes, but only"):
        load(make("llama"), device_map="auto")


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_model_larger_than_memory_is_refused_before_it_is_loaded(
    make: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    need = sum(p.nbytes for p in load(make("llama"), "cpu", dtype).network.parameters())
    monkeypatch.setattr(device_map, "free_bytes", lambda _: need - 1)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(CapacityError, match=rf"need {need:,} bytes, .* \(cpu {need - 1:,}\)"):
        load(make("llama"), "cpu", dtype)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    rest=st.integers(0, 60),
    free=st.lists(st.integers(1, 200), min_size=1, max_size=4),
)
def test_layers_are_placed_in_order_and_fit(sizes: list[int], rest: int, free: list[int]) -> None:
    chosen = spread(sizes, rest, free)
    if chosen is None:  # filling each device as far as possible does not do either
        number, left = 0, free[0] - rest
        fits = left >= 0
        for size in sizes:
            while fits and size > left:
                number += 1
                fits = number < len(free)
                left = free[number] if fits else 0
            left -= size
        assert not fits
        return
    assert chosen == sorted(chosen)
    for number, room in enumerate(free):
        used = sum(s for s, at in zip(sizes, chosen, strict=True) if at == number)
        assert used + (rest if number == 0 else 0) <= room


@pytest.mark.parametrize(
    ("given_map", "message"),
    [
        ("balanced", "device_map 'balanced' must be 'auto', or devices by the names"),
        ({}, "must be 'auto', or devices"),
        ({"": "gpu"}, "'' has the unknown device 'gpu'"),
        ({"": "meta"}, "must be cpu or cuda"),
        ({"": "cpu", "model.layers.9": "cpu:1"}, "no module 'model.layers.9'; its layers are"),
        ({"model.layers": "cpu"}, "no device for 'model.embed_tokens.weight'; give one for ''"),
        ({"": "cpu:0", "lm_head": "cpu:1"}, "must be on one device, not on cpu:0, cpu:1"),
        ({"": "cpu:0", "model.layers.1.mlp": "cpu:1"}, "'model.layers.1.mlp' is part of a layer"),
    ],
)
def test_wrong_maps_are_refused(make: Callable[[str], str], given_map: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(make("llama"), device_map=given_map)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_auto_without_a_gpu_is_refused(make: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="spreads layers over GPUs, but there are none"):
        load(make("llama"), device_map="auto")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"policy": "snapkv"}, "policy 'snapkv' cannot be used with device_map"),
        ({"prefill_policy": "x_attention"}, "prefill_policy 'x_attention' cannot be used with"),
        ({"total_memory": "1GiB"}, "total_memory 1073741824 cannot be used with device_map"),
        ({"device": "cpu"}, "device 'cpu' cannot be combined with device_map"),
    ],
)
def test_what_has_data_on_one_device_is_refused(
    make: Callable[[str], str], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(make("llama"), device_map=SPLIT, **more)


def test_loaded_models_are_refused(make: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="needs the name of a model"):
        LLM(load(make("llama"), "cpu"), device_map=SPLIT)


REUSES = [
    "recompute",
    "reuse",
    "epic",
    "cacheblend:recompute_ratio=0.5",
    "multi_infllm:num_blocks=3,num_local_blocks=1",
    "sam_kv:block_size=4,num_initial_blocks=1,num_local_blocks=1",
    "sam_kv:block_size=4,num_initial_blocks=1,num_local_blocks=1,update=fusion",
]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "quest:token_budget=32", "delta:token_budget=32"])
@pytest.mark.parametrize("reuse", REUSES)
def test_documents_on_two_devices_are_those_of_one(
    make: Callable[[str], str], places: Places, tmp_path: Path, reuse: str, policy: str
) -> None:
    """They are encoded, loaded, computed again and read where each layer is."""
    asked = {"question": {"prompt_token_ids": [7, 8, 9]}, "documents": ["one", "two"]}
    results, stored = [], []
    for number, place in enumerate(({"device": "cpu"}, {"device_map": SPLIT})):
        llm = LLM(
            make("llama"),
            policy,
            prefill_chunk=16,
            page_size=8,
            documents=tmp_path / str(number),
            hot_document_bytes=2000,
            host_document_bytes=1 << 20,
            **place,  # type: ignore[arg-type]
        )
        llm.documents.add("one", {"prompt_token_ids": list(range(5, 69))}, block_size=4)
        llm.documents.add("two", {"prompt_token_ids": list(range(70, 102))}, block_size=4)
        stored.append([llm.documents.store.open(name) for name in ("one", "two")])
        twice = [llm.ask(**asked, reuse=reuse, params=LOGPROBS) for _ in range(2)]
        assert twice[0].token_ids == twice[1].token_ids
        results.append(twice[0])
        assert (places.sent > 0) == (number == 1)
    for ours, theirs in zip(*stored, strict=True):
        for layer in range(4):
            for a, b in zip(ours.rows(layer, 0, 32), theirs.rows(layer, 0, 32), strict=True):
                assert torch.equal(a, b)
    assert results[0].token_ids == results[1].token_ids
    assert results[0].logprobs == results[1].logprobs

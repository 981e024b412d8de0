"""Thresholds are those of the paper's equations, and what is predicted is what is measured."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keyhole.cache.layout import data_bytes, layer_memory
from keyhole.cache.pages import PageCache
from keyhole.errors import CapacityError, ConfigError
from keyhole.models.loading import load
from keyhole.planner import LayerMemory, MemoryModel, MemoryPlan, buffer_tokens
from keyhole.policies.quest import Quest
from tests.checkpoints import KINDS, make_model

GIB = 2**30

#: Llama-3.1-8B in fp16 (eight KV heads in groups of four), with a draft of one layer like its own.
LLAMA = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "groups": 4}
LLAMA_BYTES = {"model_bytes": 2 * 8_030_261_248, "head_bytes": 2 * 218_112_000}


def paper(memory_of: dict[str, int], requests: int, token_budget: int) -> MemoryModel:
    return MemoryModel.paper(**memory_of, requests=requests, token_budget=token_budget)


@st.composite
def papers(draw: st.DrawFn) -> dict[str, int]:
    counts = {"num_layers": 40, "num_kv_heads": 9, "head_dim": 256, "requests": 9}
    found = {name: draw(st.integers(1, most)) for name, most in counts.items()}
    found["token_budget"] = draw(st.integers(1, 5000))
    found["groups"] = draw(st.sampled_from([0, 2, 3, 4, 7]))
    return found | {name: draw(st.integers(0, 10**11)) for name in ("model_bytes", "head_bytes")}


@st.composite
def models(draw: st.DrawFn) -> MemoryModel:
    layers = []
    for _ in range(draw(st.integers(1, 9))):
        token_bytes = draw(st.integers(1, 3000))
        layers.append(
            LayerMemory(
                token_bytes=token_bytes,
                slot_bytes=token_bytes + draw(st.integers(0, 40)),
                movable=draw(st.booleans()),
            )
        )
    token_budget = draw(st.integers(1, 300))
    page_size = draw(st.sampled_from([1, 3, 16]))
    return MemoryModel(
        layers=tuple(layers),
        requests=draw(st.integers(1, 9)),
        token_budget=token_budget,
        buffer_tokens=buffer_tokens(token_budget, page_size),
        page_size=page_size,
        weight_bytes=draw(st.integers(0, 10**6)),
        side_page_bytes=draw(st.integers(0, 2000)),
        list_page_bytes=8,
        head_weight_bytes=draw(st.integers(0, 1000)),
        request_bytes=draw(st.integers(0, 1000)),
        staging_bytes=draw(st.integers(0, 1000)),
        gathered_token_bytes=draw(st.integers(0, 100)),
        runtime_bytes=draw(st.integers(0, 1000)),
    )


def test_a_worked_example_of_the_papers_thresholds() -> None:
    """Four requests to Llama-3.1-8B in 24 GiB, computed by hand.

    1.3 (M_O + M_D) = 21,445,770,444.8 bytes leave 4,324,033,331.2 of 25,769,803,776. A token of
    all requests is 4 R H D = 16,384 bytes in a layer, and 37 layers count: 32, the head's and four
    of its repeated keys and values. So S_0 = floor(4,324,033,331.2 / 606,208). Each layer
    below takes 2048 * 16,384 = 33,554,432 bytes for its buffer, and one from 37.
    """
    model = paper(LLAMA | LLAMA_BYTES, requests=4, token_budget=2048)
    thresholds = model.thresholds(24 * GIB)
    assert len(thresholds) == 33
    assert thresholds[0] == 7132
    assert thresholds[1] == 7274
    assert thresholds[32] == 39676
    assert model.bytes(7132, 0) == math.ceil(Fraction("21445770444.8")) + 7132 * 606_208


@given(papers(), st.integers(1, 10**12))
def test_the_papers_thresholds_are_equations_6_to_8(shape: dict[str, int], memory: int) -> None:
    names = ("model_bytes", "head_bytes", "num_layers", "num_kv_heads", "head_dim", "requests")
    m_o, m_d, layers, heads, dim, requests = (shape[name] for name in names)
    budget, alpha = shape["token_budget"], shape["groups"]
    weights = Fraction(13, 10) * (m_o + m_d)
    row = 4 * requests * heads * dim
    expected = [
        (memory - weights - row * i * budget) / (row * (layers + 1 + alpha - i))
        for i in range(layers + 1)
    ]
    model = MemoryModel.paper(**shape)
    assert model.thresholds(memory) == tuple(max(0, math.floor(s)) for s in expected)
    length = 1000
    for i in (0, layers // 2, layers):
        rows = (layers - i + 1 + alpha) * length + i * budget
        assert model.bytes(length, i) == math.ceil(weights + row * rows)


def test_the_papers_algorithm_1_overflows_where_its_equation_7_does_not() -> None:
    """Erratum: Algorithm 1 takes i B R H D off the memory, and Eq. 7 adds 4 i B R H D."""
    model = paper(LLAMA | LLAMA_BYTES, requests=4, token_budget=2048)
    memory = 24 * GIB
    left = memory - model.terms(0, 0)["weights"]
    printed = (left - 32 * 2048 * 4 * 8 * 128) // (4 * (32 + 1 + 4 - 32) * 4 * 8 * 128)
    assert model.bytes(printed, 32) > memory
    assert model.bytes(model.thresholds(memory)[32], 32) <= memory
    assert printed - model.thresholds(memory)[32] == 9830


@given(models(), st.integers(1, 10**7))
def test_a_threshold_is_the_longest_text_that_fits(model: MemoryModel, memory: int) -> None:
    thresholds = model.thresholds(memory)
    assert len(thresholds) == len(model.layers) + 1
    for i in range(len(model.order) + 1):
        assert thresholds[i] == 0 or model.bytes(thresholds[i], i) <= memory
        assert memory < model.bytes(thresholds[i] + 1, i)
        assert thresholds[i] % model.page_size == 0


@given(models(), st.integers(0, 3000), st.integers(0, 10**5))
def test_thresholds_do_not_fall_once_a_text_outgrows_the_buffer(
    model: MemoryModel, more: int, left: int
) -> None:
    buffers = [model.requests * model.buffer_tokens * layer.slot_bytes for layer in model.layers]
    rows = [model.requests * layer.token_bytes for layer in model.layers]
    both = zip(buffers, rows, strict=True)
    length = max(-(-(buffer + model.staging_bytes) // row) for buffer, row in both)
    thresholds = model.thresholds(model.bytes(length + more, 0) + left)
    assert thresholds[0] >= length + more
    assert all(a <= b for a, b in itertools.pairwise(thresholds))


def test_thresholds_fall_where_the_budget_is_longer_than_the_texts() -> None:
    model = paper(LLAMA | LLAMA_BYTES, requests=4, token_budget=8192)
    thresholds = model.thresholds(24 * GIB)
    assert all(a > b for a, b in itertools.pairwise(thresholds[:10]))
    plan = MemoryPlan(model=model, memory=24 * GIB)
    assert plan.offloaded(thresholds[0]) == 0
    with pytest.raises(CapacityError):
        plan.offloaded(thresholds[0] + 1)


@given(models(), st.integers(1, 10**7), st.integers(1, 5000))
def test_as_few_layers_are_offloaded_as_possible(
    model: MemoryModel, memory: int, length: int
) -> None:
    fits = [i for i in range(len(model.order) + 1) if model.bytes(length, i) <= memory]
    if model.bytes(0, 0) > memory:
        with pytest.raises(CapacityError, match="the weights need"):
            model.offloaded(length, memory)
    elif fits:
        assert model.offloaded(length, memory) == fits[0]
    else:
        with pytest.raises(CapacityError, match=f"requests of {length} tokens need"):
            model.offloaded(length, memory)


@given(models(), st.integers(1, 10**7), st.integers(1, 5000))
def test_the_largest_batch_fits_and_a_larger_one_does_not(
    model: MemoryModel, memory: int, length: int
) -> None:
    largest = model.largest_batch(length, memory)
    places = range(len(model.order) + 1)
    assert largest == max(model.largest_batch(length, memory, i) for i in places)

    def fits(requests: int) -> bool:
        other = dataclasses.replace(model, requests=requests)
        return any(other.bytes(length, i) <= memory for i in places)

    assert largest == 0 or fits(largest)
    assert not fits(largest + 1)


@given(models(), st.integers(1, 10**7), st.data())
def test_a_plan_counts_the_pages_of_requests_of_any_length(
    model: MemoryModel, memory: int, data: st.DataObject
) -> None:
    assume(model.bytes(0, 0) <= memory)
    plan = MemoryPlan(model=model, memory=memory)
    pages = data.draw(st.integers(1, max(plan.capacities) + 2))
    fits = [i for i, most in enumerate(plan.capacities) if pages <= most]
    assert plan.offloaded_for(pages) == (fits[0] if fits else None)
    for i in fits:
        assert sum(model.terms(pages, i).values()) <= memory


def test_layers_become_resident_again_once_they_can_grow() -> None:
    """Room for what requests may still need, but no more than an eighth of what fits."""
    layers = 4 * (LayerMemory(token_bytes=100, slot_bytes=100, movable=True),)
    model = MemoryModel(
        layers=layers,
        requests=1,
        token_budget=10,
        buffer_tokens=11,
        weight_bytes=0,
        list_page_bytes=8,
    )
    plan = MemoryPlan(model=model, memory=400 * 800)
    most, more = plan.capacities[:2]
    assert 700 < most < more
    assert plan.still_offloaded(most - most // 8, 10**6, 1) == 0
    assert plan.still_offloaded(most - most // 8 + 1, 10**6, 1) == 1
    assert plan.still_offloaded(most - 3, 3, 1) == 0
    assert plan.still_offloaded(most - 3, 4, 1) == 1
    assert plan.still_offloaded(0, 0, 4) == 0
    assert plan.still_offloaded(0, 0, 4, 2) == 2
    assert plan.still_offloaded(most + 1, 0, 3) == 1


def test_the_last_layers_are_offloaded_first_and_windows_never() -> None:
    layer = LayerMemory(token_bytes=8, slot_bytes=8)
    window = dataclasses.replace(layer, movable=False)
    model = MemoryModel(
        layers=(layer, window, layer, window),
        requests=1,
        token_budget=4,
        buffer_tokens=32,
        page_size=16,
        weight_bytes=0,
    )
    assert model.order == (2, 0)
    thresholds = model.thresholds(10**5)
    assert len(thresholds) == 5
    assert thresholds[0] < thresholds[1] < thresholds[2] == thresholds[3] == thresholds[4]
    assert model.offloaded_bytes(100, 1) == 7 * 16 * 8


@pytest.mark.parametrize("name", ["requests", "token_budget"])
def test_nothing_is_planned_for_zero(name: str) -> None:
    settings = {"requests": 1, "token_budget": 1} | {name: 0}
    with pytest.raises(ConfigError, match=f"{name} 0 must be at least 1"):
        MemoryModel(layers=(), buffer_tokens=16, weight_bytes=0, **settings)


def test_memory_that_does_not_hold_the_weights_is_refused_with_numbers() -> None:
    model = paper(LLAMA | LLAMA_BYTES, requests=1, token_budget=1024)
    assert model.thresholds(8 * GIB) == (0,) * 33
    with pytest.raises(CapacityError, match=r"20452\.3 MiB, but the limit is 8192\.0 MiB"):
        MemoryPlan(model=model, memory=8 * GIB)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_what_was_predicted(kind: str, tmp_path: Path) -> None:
    """Tensor accounting: every weight, every tensor of a full cache and Quest's data beside it."""
    model = load(make_model(kind, tmp_path), "cpu")
    geometry = model.geometry(16)
    shapes = [
        {} if layer.window is not None else Quest().page_data(layer, geometry.page_size)
        for layer in geometry.layers
    ]
    cache = PageCache(geometry, 192, dtype=model.dtype, device=model.device, page_data=shapes)
    cache.allocate(192)
    tensors = [*cache._pages, *(tensor for data in cache.data for tensor in data.values())]
    weights = {id(p): p.nbytes for p in model.network.parameters()}
    planned = MemoryModel(
        layers=layer_memory(geometry),
        requests=3,
        token_budget=64,
        buffer_tokens=80,
        page_size=16,
        weight_bytes=sum(weights.values()),
        side_page_bytes=data_bytes(geometry, shapes),
        list_page_bytes=8,
    )
    terms = planned.terms(planned.pages(1024), 0)
    measured = sum(tensor.nbytes for tensor in tensors)
    assert terms["keys_values"] + terms["side_data"] == measured
    assert terms["lists"] == 8 * 192
    assert planned.bytes(1024) == measured + sum(weights.values()) + 8 * 192


_RESIDENT = """
import sys
import torch
from keyhole.bench.model import release_memory, used_bytes
from keyhole.llm import LLM
from keyhole.config import SamplingParams
from keyhole.exactness_gate import require
from keyhole.models.loading import load

cpu = torch.device("cpu")
torch.set_num_threads(2)

def run(path, length):
    llm = LLM(path, device="cpu", max_batch=4)
    prompts = [{"prompt_token_ids": [n + 3] * (length - 8)} for n in range(4)]
    llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    return llm

run(sys.argv[1], 48)
require(load(sys.argv[2]).network.config, "large")  # whose small model takes memory once
release_memory()
before = used_bytes(cpu)
llm = run(sys.argv[2], 1024)
release_memory()
print(used_bytes(cpu) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_resident_set_grows_by_what_was_predicted(tmp_path: Path) -> None:
    """What a process holds after four texts of 1024 tokens; buffers of a step are free by then."""
    small = make_model("llama", tmp_path)
    wide = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
    wide |= {"head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 8}
    large = make_model("llama", tmp_path, max_position_embeddings=2048, **wide)
    done = subprocess.run(
        [sys.executable, "-c", _RESIDENT, small, large],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model = load(large, "cpu")
    planned = MemoryModel(
        layers=layer_memory(model.geometry(16)),
        requests=4,
        token_budget=64,
        buffer_tokens=80,
        page_size=16,
        weight_bytes=sum(p.nbytes for p in model.network.parameters()),
        list_page_bytes=8,
    )
    assert int(done.stdout.split()[-1]) == pytest.approx(planned.bytes(1024), rel=0.05)

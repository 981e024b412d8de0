"""What `keyhole plan` states is what an engine does: the same terms, weights among them."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
import tracemalloc
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keyhole import LLM, CapacityError, ConfigError, Quest, SamplingParams, SpeContext
from keyhole.cache.layout import (
    Geometry,
    LayerLayout,
    ModelSize,
    gathered_bytes,
    list_bytes,
    memory_model,
)
from keyhole.cache.resident_buffer import ResidentBuffer
from keyhole.cli import main
from keyhole.config import EngineConfig
from keyhole.engine import model_runner
from keyhole.engine.allocation import make_plan, memory_of, model_size, page_data
from keyhole.engine.decode_inputs import SequenceState
from keyhole.engine.engine import Engine
from keyhole.engine.sampler import sample, top_logprobs
from keyhole.engine.sequence import Sequence
from keyhole.kernels.triton import flash_attention
from keyhole.models import checkpoint
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import make_policy
from keyhole.tokenization import Detokenizer
from tests.checkpoints import KINDS, make_model
from tests.engine.test_allocation import buffer_bytes
from tests.policies.models import prompt, with_head

PAGE, BUDGET, FLOAT = EngineConfig.page_size, 16, 4
FIELDS: dict[str, Any] = {
    "num_hidden_layers": 6,
    "vocab_size": 64,
    "max_position_embeddings": 2048,
}
POLICIES = ["streaming_llm", "quest", "delta", "tidal_decode", "omnikv", "spe_context"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model("llama", tmp_path_factory.mktemp("models"), **FIELDS)
    with_head(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder, "cpu")


def stated(capsys: pytest.CaptureFixture[str], folder: Path, *options: object) -> dict[str, Any]:
    """What the command prints."""
    assert main(["plan", "--model", str(folder), "--json", *map(str, options)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def engine_of(model: Model, policy: str, requests: int, **memory: Any) -> Engine:
    return LLM(
        model, make_policy(policy, {"token_budget": BUDGET}), max_batch=requests, **memory
    ).engine


def lengths_at_which_layers_move(engine: Engine, requests: int, last: int) -> dict[int, int]:
    """For each number of offloaded layers, the longest sequences (all equally long) with it."""
    assert engine.offloader is not None
    params = SamplingParams(max_tokens=last - 20, temperature=0.0, ignore_eos=True)
    running = [engine.add(prompt(20, seed), params) for seed in range(requests)]
    longest: dict[int, int] = {}
    while engine.has_work:
        engine.step()
        lengths = {request.num_computed for request in running if not request.is_finished}
        assert len(lengths) <= 1
        for length in lengths:
            longest[engine.offloader.offloaded] = length
    return longest


@pytest.mark.slow
@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_layers_move_at_the_lengths_that_were_stated(
    folder: Path,
    model: Model,
    policy: str,
    requests: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`memory` counted the weights in one place and not in the other, and the plan no side data."""
    options = ("--policy", policy, "--token-budget", BUDGET, "--requests", requests)
    roomy = stated(capsys, folder, *options, "--total-memory", "1GiB")
    least = roomy["total_memory"] - roomy["memory"]  # weights, and what a step computes with
    total = least + 100_000 * requests
    plan = stated(capsys, folder, *options, "--total-memory", total)
    assert plan["weight_bytes"] == sum(x.nbytes for x in model.network.parameters())
    assert plan["memory"] == 100_000 * requests
    below = {"offload": tmp_path}
    for memory in ({"total_memory": total}, {"memory": plan["memory"]}):
        engine = engine_of(model, policy, requests, **memory, **below)
        assert engine.offloader is not None
        ours = engine.offloader.plan.as_dict([100])
        assert {name: plan[name] for name in ours if name != "lengths"} == {
            name: value for name, value in json.loads(json.dumps(ours)).items() if name != "lengths"
        }
    thresholds, movable = plan["thresholds"], len(plan["order"])
    last = min(thresholds[min(movable, 3)], 600)
    found = lengths_at_which_layers_move(engine, requests, last)
    crossed = [i for i in range(movable) if 20 < thresholds[i] < last]
    assert len(crossed) >= min(2, movable)
    for i in crossed:
        if thresholds[i] > max([0, *thresholds[:i]]):
            assert found[i] == thresholds[i]


def test_thresholds_by_hand(folder: Path, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    """Eq. 7 with every number taken from the config, and Quest's bounds beside the keys."""
    network, requests, total = model.network, 2, 3_000_000
    weights = sum(x.numel() for x in network.parameters()) * FLOAT
    hidden, mlp, heads, kv_heads, dim = 32, 48, 4, 2, 8
    step = 2 * hidden + max(3 * mlp, 3 * (heads + 2 * kv_heads) * dim)
    runtime = 2 * (1024 + requests) * step * FLOAT
    logits = requests * 64 * (2 * FLOAT + 34)
    row = kv_heads * 2 * dim * FLOAT  # keys and values of a token in a layer
    bounds = 2 * kv_heads * dim * FLOAT  # of a page in a layer
    slot = row + kv_heads * 4
    expected = []
    for i in range(7):
        down = min(i, 4)  # Quest reads the first two layers in full
        lists = 104 + PAGE * 24  # page numbers and the index of prefixes; ids, times and text
        page = PAGE * row * (6 - down) + 6 * bounds + lists
        buffers = down * requests * (BUDGET + PAGE) * slot
        pages = (total - weights - runtime - logits - buffers) // page
        expected.append(pages // requests * PAGE)
    options = ("--policy", "quest", "--token-budget", BUDGET, "--requests", requests)
    plan = stated(capsys, folder, *options, "--total-memory", total)
    assert plan["thresholds"] == expected


def test_heavier_weights_leave_less_for_texts(
    folder: Path, model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the same total memory, layers of the heavier model are offloaded earlier, by exactly its
    additional bytes.

    At the same memory for the KV cache they move at the same lengths.
    """
    heavy_folder = make_model("llama", tmp_path, **FIELDS | {"vocab_size": 512})
    heavy = load(heavy_folder, "cpu")
    more = 2 * (512 - 64) * 32 * FLOAT + (512 - 64) * (2 * FLOAT + 34)
    options = ("--policy", "quest", "--token-budget", BUDGET)
    light_plan, heavy_plan, same = (
        stated(capsys, path, *options, "--total-memory", total)
        for path, total in (
            (folder, 2_500_000),
            (heavy_folder, 2_500_000),
            (heavy_folder, 2_500_000 + more),
        )
    )
    assert same["thresholds"] == light_plan["thresholds"]
    assert all(
        a < b for a, b in zip(heavy_plan["thresholds"], light_plan["thresholds"], strict=True)
    )
    memory = {"memory": "200KiB", "offload": tmp_path}
    engines = [engine_of(one, "quest", 1, **memory) for one in (model, heavy)]
    plans = [engine.offloader.plan for engine in engines if engine.offloader is not None]
    assert plans[0].thresholds == plans[1].thresholds
    assert plans[0].memory != plans[1].memory


@pytest.mark.slow
def test_all_together_stay_within_the_total(model: Model, tmp_path: Path) -> None:
    """Weights and what is above of the cache, counted in tensors, beside what a step is given."""
    total = 2_500_000
    engine = engine_of(model, "quest", 1, total_memory=total, offload=tmp_path)
    assert engine.offloader is not None
    plan = engine.offloader.plan
    terms = plan.model.terms(0, 0)
    step = terms["requests"] + terms["runtime"]
    weights = sum(x.nbytes for x in model.network.parameters())
    params = SamplingParams(max_tokens=plan.thresholds[2] - 20, temperature=0.0, ignore_eos=True)
    engine.add(prompt(20), params)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.cache.resident_bytes + buffer_bytes(engine))
    assert engine.offloader.offloaded == 2
    assert weights + step + 0.9 * plan.cache_memory < weights + step + most <= total


def test_the_total_limits_a_cache_without_a_lower_tier_too(model: Model) -> None:
    engine = engine_of(model, "quest", 2, total_memory=3_000_000)
    size = model_size(model, None)
    step = 2 * (1024 + 2) * size.step_numbers * FLOAT + 2 * 64 * (2 * FLOAT + 34)
    left = 3_000_000 - size.weight_bytes - step
    lists = 104 + PAGE * 24
    assert engine.cache.max_pages == left // (engine.cache.page_bytes + lists)
    dense = LLM(model, max_batch=2, total_memory=3_000_000).engine
    assert dense.cache.max_pages == left // (dense.cache.page_bytes + lists)
    # What cannot go below does not matter where nothing does.
    apart = Quest(token_budget=BUDGET, share_group=False)
    assert LLM(model, apart, total_memory=3_000_000).engine.offloader is None
    with pytest.raises(CapacityError, match=r"raise total_memory=.*or lower max_tokens"):
        dense.add(prompt(20), SamplingParams(max_tokens=2000))


def test_a_plan_without_offload_has_the_pages_of_the_engine(
    folder: Path, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan counted lists on the host, which memory= without offload does not."""
    size = 100_000
    for limit in ("memory", "total_memory"):
        total = limit == "total_memory"
        given = size + 2**24 if total else size
        flag = f"--{limit.replace('_', '-')}"
        plan = stated(capsys, folder, "--policy", "full", flag, given)
        cache = LLM(model, "full", max_batch=1, **{limit: given}).engine.cache
        assert plan["order"] == []
        assert plan["thresholds"][0] == cache.max_pages * PAGE
        assert (plan["list_page_bytes"] > 0) == total


@pytest.mark.parametrize("policy", ["snapkv", "r_kv", "raas", "shadowkv"])
def test_what_a_policy_keeps_of_sequences_is_part_of_the_total(
    model: Model, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last queries and the kept tokens of each sequence, which were not counted."""
    held: list[SequenceState] = []

    class Watched(SequenceState):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            held.append(self)

    monkeypatch.setattr(model_runner, "SequenceState", Watched)
    requests, total = 3, 6_000_000
    engine = engine_of(model, policy, requests, total_memory=total)
    (state,) = held
    kept = sum(x.nbytes for x in state.tensors.values())
    assert kept > 0
    plan = make_plan(
        memory_of(
            engine.geometry,
            engine.policy,
            model_size(model),
            page_data(engine.geometry, engine.policy, None),
            layers=(),
            requests=requests,
            prefill_chunk=engine.config.prefill_chunk,
        ),
        engine.config,
    )
    logits = requests * 64 * (2 * FLOAT + 34)
    assert plan.model.terms(0, 0)["requests"] == kept + logits
    assert engine.cache.max_pages == plan.capacities[0]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_weighs_what_its_files_say(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path)
    model, shape = load(path, "cpu"), checkpoint.read(path)
    found = model_size(model, None)
    assert found.weight_bytes == shape.num_parameters * shape.itemsize
    assert (found.vocab_size, found.step_numbers) == (shape.vocab_size, shape.step_numbers)


def test_a_head_beside_the_model_counts(
    folder: Path, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--token-budget", BUDGET, "--total-memory", "8MiB")
    plain, headed = (
        stated(capsys, folder, *options, "--policy", policy)
        for policy in ("streaming_llm", "spe_context")
    )
    engine = LLM(model, SpeContext(token_budget=BUDGET)).engine
    assert engine.head_runner is not None
    head = engine.head_runner.head
    assert headed["head_weight_bytes"] == sum(x.nbytes for x in head.parameters()) > 0
    assert plain["head_weight_bytes"] == 0
    assert headed["side_page_bytes"] > plain["side_page_bytes"]
    assert headed["thresholds"] < plain["thresholds"]


def held_bytes() -> int:
    """Without what pytest-xdist receives meanwhile, in a thread: lists of thousands of tests."""
    gc.collect()
    others = [tracemalloc.Filter(False, f"*/{name}/*") for name in ("execnet", "xdist")]
    traces = tracemalloc.take_snapshot().filter_traces(others).traces
    return sum(trace.size for trace in traces)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_lists_of_a_long_prompt_take_what_is_planned(tmp_path: Path) -> None:
    """Lists of Python's numbers and an entry in a dictionary for each page took 32 bytes a token,
    which no plan counted. They take 12, and as many more are planned for tokens of an answer.
    """
    count = 32_768
    model = load(make_model("llama", tmp_path, **FIELDS | {"max_position_embeddings": 2 * count}))
    engine = LLM(model, Quest(token_budget=BUDGET), max_batch=1, device="cpu").engine
    text = array("i", np.random.default_rng(0).integers(3, 64, size=count + 1).tolist())
    before, traced = held_bytes(), tracemalloc.get_traced_memory()[0]
    pages = engine.cache.allocate(count // PAGE)
    assert pages is not None
    assert engine.prefix is not None
    engine.prefix.insert(text, pages, count)
    engine.cache.release(pages)
    del pages
    sequence = engine.add(text, SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0))
    while not sequence.is_finished:
        tracemalloc.reset_peak()
        engine.step()
        assert len(sequence.pages) in (0, count // PAGE + 1)
        peak = tracemalloc.get_traced_memory()[1]
    assert held_bytes() - before <= 12 * count
    assert peak - traced <= list_bytes(PAGE) * count // PAGE


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_lists_of_an_answer_take_what_is_planned() -> None:
    """A generated token took 110 bytes in lists of Python's numbers."""
    count, rng = 20_000, np.random.default_rng(0)
    ids, before = array("i", rng.integers(3, 32_000, size=count).tolist()), held_bytes()
    sequence = Sequence(array("i", [1]), SamplingParams(), Detokenizer(None))
    for token in ids:
        sequence.tokens.append(token)
        sequence.detokenizer.append(token)
        now = time.perf_counter()
        sequence.token_times.append(now)
        sequence.step_ms.append(now)
    assert held_bytes() - before <= 26 * count
    assert sequence.generated == ids.tolist()


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "filtered": {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
    "penalised": {"temperature": 1.0, "presence_penalty": 1.0, "logit_bias": {3: 1.0}},
    "repeated": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_holds_no_more_than_is_planned(name: str, dtype: torch.dtype) -> None:
    """Drawing a token took 34 bytes for each of the vocabulary, of which 8 were counted."""
    rows, vocab = 3, 5000
    params = SamplingParams(**SAMPLING[name]).resolve({})
    sequences = [Sequence(array("i", [1, 2]), params, Detokenizer(None)) for _ in range(rows)]
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
    size = ModelSize(weight_bytes=0, vocab_size=vocab, step_numbers=0)
    geometry = Geometry(
        layers=(LayerLayout(num_kv_heads=1, key_dim=8, value_dim=8),),
        num_query_heads=1,
        page_size=PAGE,
        itemsize=dtype.itemsize,
    )
    about = {"requests": rows, "token_budget": BUDGET, "prefill_chunk": 1}
    planned = memory_model(geometry, size, **about).terms(0, 0)["requests"]
    with PeakBytes() as sampled:
        tokens, _ = sample(logits, sequences)
    with PeakBytes() as listed:
        top_logprobs(logits, tokens, 5)
    assert logits.nbytes + max(sampled.most, listed.most) <= planned


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors that were made in the block and existed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._live = [(storage, size) for storage, size in self._live if not storage.expired()]
        known = {storage.cdata for storage, _ in self._live}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                storage = StorageWeakRef(tensor.untyped_storage())
                if storage.cdata not in known:
                    self._live.append((storage, tensor.untyped_storage().nbytes()))
        self.most = max(self.most, sum(size for _, size in self._live))
        return made


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_prompt_on_a_gpu_copies_no_more_than_is_planned(
    kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies the pages of one layer, offloaded or not, which no plan counted."""
    layout = LayerLayout(num_kv_heads=2, key_dim=8, value_dim=8)
    plain = Geometry(layers=(layout,), num_query_heads=4, page_size=PAGE, itemsize=2)
    geometry, count = plain.stored_as(kv_dtype), 40
    dtype = {"auto": torch.bfloat16, "int8": torch.int8, "fp8": torch.uint8}[kv_dtype]
    rows = [
        torch.zeros(count, 2, PAGE, width, dtype=dtype)
        for width in 2 * [geometry.layers[0].key_row]
    ]
    query = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(
        flash_attention.F, "scaled_dot_product_attention", lambda query, *_, **__: query
    )
    monkeypatch.setattr(flash_attention, "causal_lower_right", lambda *_: None)
    pages = torch.arange(count)
    with PeakBytes() as copied:
        flash_attention.prefill(query, *rows, pages, count * PAGE - 1, scale=1.0)
    planned = gathered_bytes(geometry) * count * PAGE
    assert 0.8 * planned < copied.most <= planned


def test_a_plan_for_a_gpu_counts_that_copy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--policy", "quest", "--token-budget", BUDGET, "--memory", 200_000)
    plain = stated(capsys, folder, *options)
    found = stated(capsys, folder, *options, "--device", "cuda")
    assert (plain["gathered_token_bytes"], found["gathered_token_bytes"]) == (0, 2 * 2 * 8 * FLOAT)
    pages = [plan["thresholds"][0] // PAGE for plan in (plain, found)]
    each = 200_000 // pages[0]
    # abs=1: both numbers of pages are whole, and `each` was found from one of them.
    assert pages[1] == pytest.approx(200_000 / (each + PAGE * 2 * 2 * 8 * FLOAT), abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["quest", "spe_context"])
def test_a_layer_leaves_before_its_buffers_come(
    model: Model, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers were made while the layer was there, beyond the memory of the plan."""
    engine = engine_of(model, policy, 2, memory=400_000, offload=tmp_path)
    assert engine.offloader is not None
    held: list[int] = []
    make = ResidentBuffer.__init__

    def counted(self: ResidentBuffer, *args: Any, **more: Any) -> None:
        make(self, *args, **more)
        size = self.keys.untyped_storage().nbytes() + self.entries.nbytes
        held.append(engine.cache.resident_bytes + buffer_bytes(engine) + size)

    monkeypatch.setattr(ResidentBuffer, "__init__", counted)
    length = engine.offloader.plan.thresholds[2] - 20
    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    engine.add(prompt(20), params)
    engine.add(prompt(20, 1), params)
    while engine.has_work:
        engine.step()
    assert len(held) >= 2
    assert max(held) <= 400_000


def test_a_layer_without_room_for_its_buffers_stays(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, "quest", 1, memory=400_000, offload=tmp_path)
    assert engine.offloader is not None
    pages = engine.cache.allocate(3)
    assert pages is not None
    engine.cache.keys[5][pages] = 7
    with monkeypatch.context() as patch:
        patch.setattr(ResidentBuffer, "__init__", mock.Mock(side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            engine.offloader.offload_layer(1)
    assert engine.cache.offloaded_layers == engine.offloader.prefetcher.layers == ()
    engine.offloader.offload_layer(1)
    assert engine.cache.offloaded_layers == engine.offloader.prefetcher.layers == (5,)
    assert (engine.cache.keys[5][pages] == 7).all()


def test_an_unknown_policy_has_no_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(folder), "--memory", "8MiB", "--policy", "qest"]) == 2
    assert "did you mean 'quest'" in capsys.readouterr().err


def test_one_limit_is_given(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory .* and total_memory .* cannot be combined"):
        LLM(model, memory="1MiB", total_memory="2MiB")
    with pytest.raises(ConfigError, match=r"offload needs memory=.*total_memory="):
        LLM(model, Quest(), offload=tmp_path)
    with pytest.raises(ConfigError, match="total_memory 'much' is not a size"):
        LLM(model, total_memory="much")
    with pytest.raises(ConfigError, match="total_memory 0 must be at least 1"):
        dataclasses.replace(EngineConfig(), total_memory=0)
    with pytest.raises(CapacityError, match="the weights need"):
        LLM(model, Quest(), total_memory="1KiB", offload=tmp_path)
    with pytest.raises(CapacityError, match="the weights need"):
        LLM(model, total_memory="1KiB")

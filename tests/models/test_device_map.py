"""Layers over several devices; two names of the CPU stand in for two GPUs.

torch takes `cpu:0` and `cpu:1` for one memory: a tensor that is not sent would go unnoticed.
`Places` therefore remembers which storage was sent where, and refuses an operation on two places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from keyhole import LLM, CapacityError, ConfigError, SamplingParams
from keyhole.models import device_map
from keyhole.models.batch import Batch, Chunk
from keyhole.models.device_map import spread
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies.base import SequenceRows, Step
from tests.checkpoints import make_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [list(range(3, 60)), [7, 8, 9], list(range(40, 3, -1))]
HOME, OTHER = torch.device("cpu:0"), torch.device("cpu:1")
SPLIT = {"": "cpu:0", "model.layers.1": "cpu:1", "model.layers.2": "cpu:1"}


class Places(TorchDispatchMode):
    """Where each storage is; an operation on storages of two places fails.

    Results are where their inputs are. Storages are held, so that no address is used twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, tuple[Any, torch.device]] = {}
        self.sent = 0

    def mark(self, tensor: Tensor, place: torch.device) -> None:
        storage = tensor.untyped_storage()
        self.of[storage._cdata] = storage, place

    def place(self, tensor: Tensor) -> torch.device | None:
        found = self.of.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places = {self.place(x) for x in tensors if x.dim() or x.numel() > 1} - {None}
        assert len(places) <= 1, f"{func} on {places}: {[tuple(x.shape) for x in tensors]}"
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and places and self.place(x) is None:
                self.mark(x, next(iter(places)))
        return out


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    """Copies what is sent to the other place, and notes where it is."""
    found, plain = Places(), Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = args[0] if args and isinstance(args[0], torch.device) else None
        if place is None or place.index is None or found.place(self) == place:
            return plain(self, *args, **kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            copy = self.clone()
        found.mark(copy, place)
        found.sent += 1
        return copy

    monkeypatch.setattr(Tensor, "to", to)
    run = Model.forward

    def forward(self: Model, ids: Tensor, positions: Tensor, batch: Any, rows: Tensor) -> Tensor:
        here = [ids, positions, rows, batch.slots, batch.newest, batch.touched, batch.filled]
        if batch.step is not None:
            step = batch.step
            here += [step.lengths, step.pages, step.page_table]
            here += [step.sequences.prompts, step.sequences.slots]
        here += [chunk.pages for chunk in batch.chunks]
        for tensor in here:
            if tensor is not None and tensor.numel():
                found.mark(tensor, HOME)
        _mark_model(found, self)
        _mark_cache(found, batch.cache)
        with found:
            logits = run(self, ids, positions, batch, rows)
        assert found.place(logits) == HOME
        assert all(found.place(x.indices) != OTHER for x in batch.reads if x is not None)
        return logits

    monkeypatch.setattr(Model, "forward", forward)
    at = Batch.at

    def checked(self: Batch, layer: int) -> Batch:
        view, devices = at(self, layer), self.cache.layer_devices
        wanted = HOME if devices is None else devices[layer]
        # Kernels read addresses, which `Places` does not see.
        for name, tensor in _sent(view):
            assert not tensor.numel() or found.place(tensor) == wanted, name
        return view

    monkeypatch.setattr(Batch, "at", checked)
    return found


def _sent(value: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a step that go to a layer, with their names."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _sent(one, f"{name}[{number}]")
    elif isinstance(value, Batch | Step | Chunk | SequenceRows):
        for field in dataclasses.fields(value):
            if field.name not in ("views", "reads", "cache", "policy", "keeper", "state"):
                yield from _sent(getattr(value, field.name), f"{name}.{field.name}")


def _mark_model(found: Places, model: Model) -> None:
    blocks = model.network.base_model.layers
    devices = model.layer_devices or [HOME] * len(blocks)
    for tensor in [*model.network.parameters(), *model.network.buffers()]:
        found.mark(tensor, HOME)
    for block, place in zip(blocks, devices, strict=True):
        for tensor in [*block.parameters(), *block.buffers()]:
            found.mark(tensor, place)


def _mark_cache(found: Places, cache: Any) -> None:
    for layer, place in enumerate(cache.layer_devices or [HOME] * len(cache.keys)):
        for tensor in [cache.keys[layer], cache.values[layer], *cache.data[layer].values()]:
            found.mark(tensor, place)


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


@pytest.mark.one_in(3)
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
    with pytest.raises(CapacityError, match=rf"need {need:,} bytes, and there are"):
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
        ({"": "meta"}, "give cpu or cuda devices"),
        ({"": "cpu", "model.layers.9": "cpu:1"}, "no module 'model.layers.9'; its layers are"),
        ({"model.layers": "cpu"}, "no device for 'model.embed_tokens.weight'; give one for ''"),
        ({"": "cpu:0", "lm_head": "cpu:1"}, "must be on one device, not on cpu:0, cpu:1"),
        ({"": "cpu:0", "model.layers.1.mlp": "cpu:1"}, "'model.layers.1.mlp' is a part of one"),
    ],
)
def test_wrong_maps_are_refused(make: Callable[[str], str], given_map: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(make("llama"), device_map=given_map)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_auto_without_a_gpu_is_refused(make: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="spreads layers over GPUs, and there is none"):
        load(make("llama"), device_map="auto")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"policy": "snapkv"}, "policy 'snapkv' cannot be used with device_map"),
        ({"draft": "ngram"}, "draft 'ngram' cannot be used with device_map"),
        ({"total_memory": "1GiB"}, "total_memory 1073741824 cannot be used with device_map"),
        ({"device": "cpu"}, "device 'cpu' goes without device_map"),
        ({"adapters": {"a": "folder"}}, "adapters= cannot be used with device_map"),
    ],
)
def test_what_has_data_on_one_device_is_refused(
    make: Callable[[str], str], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(make("llama"), device_map=SPLIT, **more)


def test_documents_and_loaded_models_are_refused(
    make: Callable[[str], str], tmp_path: Path
) -> None:
    llm = LLM(make("llama"), device_map=SPLIT, documents=tmp_path)
    with pytest.raises(ConfigError, match="stored documents cannot be used with device_map"):
        llm.documents.add("one", list(range(3, 40)))
    with pytest.raises(ConfigError, match="goes with the name of a model"):
        LLM(load(make("llama"), "cpu"), device_map=SPLIT)

"""The planner's terms of a cache are the bytes that the cache itself counts."""

from __future__ import annotations

import pytest
import torch

from keyhole.cache.layout import Geometry, bytes_per_page, data_bytes, layer_memory
from keyhole.cache.resident_buffer import ResidentBuffer
from keyhole.models import families
from keyhole.planner import MemoryModel, buffer_tokens
from keyhole.policies.quest import Quest
from tests.checkpoints import KINDS, make_config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_layers_and_data_sum_up_to_a_page(kind: str, itemsize: int) -> None:
    geometry = Geometry(
        layers=families.layouts(make_config(kind)),
        num_query_heads=4,
        page_size=16,
        itemsize=itemsize,
    )
    head = {"head_keys": (2, 16, 8), "head_features": (32,)}
    shapes = [*(Quest().page_data(layer, geometry.page_size) for layer in geometry.layers), head]
    rows = sum(layer.token_bytes for layer in layer_memory(geometry))
    assert 16 * rows + data_bytes(geometry, shapes) == bytes_per_page(geometry, shapes)
    assert 16 * rows == bytes_per_page(geometry, [])


@pytest.mark.parametrize(
    ("kind", "movable"),
    [("llama", [True] * 4), ("gemma2", [False, True] * 2), ("mistral_sliding", [False] * 4)],
)
def test_layers_with_a_window_stay_resident(kind: str, movable: list[bool]) -> None:
    layers = families.layouts(make_config(kind))
    geometry = Geometry(layers=layers, num_query_heads=4, page_size=16, itemsize=2)
    assert [layer.movable for layer in layer_memory(geometry)] == movable


@pytest.mark.parametrize(
    ("kind", "num_heads"), [("llama", None), ("llama_mqa", 4), ("deepseek_v3", None)]
)
@pytest.mark.parametrize("token_budget", [1, 16, 40])
def test_buffers_are_those_of_an_offloaded_layer(
    kind: str, num_heads: int | None, token_budget: int
) -> None:
    layout = families.layouts(make_config(kind))[0]
    geometry = Geometry(layers=(layout,), num_query_heads=4, page_size=16, itemsize=2)
    model = MemoryModel(
        layers=layer_memory(geometry, num_heads),
        requests=3,
        token_budget=token_budget,
        buffer_tokens=buffer_tokens(token_budget, 16),
        page_size=16,
        weight_bytes=0,
        list_page_bytes=8,
    )
    buffer = ResidentBuffer(
        layout,
        torch.empty(0, dtype=torch.bfloat16),
        page_size=16,
        num_rows=3,
        num_tokens=buffer_tokens(token_budget, 16),
        num_heads=num_heads,
    )
    buffer.entries = buffer._no_entries(1)
    held = buffer.keys.untyped_storage().nbytes() + buffer.entries.nbytes
    assert model.terms(0, 1)["buffers"] == held

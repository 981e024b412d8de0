"""Layers of a GPU in pinned memory of the host: read where they are, and through buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keyhole import kernels
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.cache.pages import PageCache
from keyhole.cache.prefetch import Prefetcher
from keyhole.cache.tiers import PinnedTier
from keyhole.kernels import ScoreRequest, Selection

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
# Attention splits lists of this length.
SIZE, BUDGET, LENGTH = 16, 256, 700
PLAIN = LayerLayout(num_kv_heads=2, key_dim=64, value_dim=32)
LATENT = LayerLayout(num_kv_heads=1, key_dim=64, value_dim=48, shared_values=True)
LAYERS = (PLAIN, LATENT, PLAIN)


def on_device(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def make_caches() -> tuple[PageCache, PageCache, list[int]]:
    """Two caches with the same numbers."""
    geometry = Geometry(layers=LAYERS, num_query_heads=4, page_size=SIZE, itemsize=4)
    device = torch.device(DEVICE)
    caches = [PageCache(geometry, 100, dtype=torch.float32, device=device) for _ in range(2)]
    pages, same = (cache.allocate(50) for cache in caches)
    assert pages is not None
    assert pages == same
    for keys, values, *copies in zip(
        caches[0].keys, caches[0].values, caches[1].keys, caches[1].values, strict=True
    ):
        keys.normal_()
        values.normal_()
        copies[0].copy_(keys)
        copies[1].copy_(values)
    return *caches, pages


@pytest.mark.parametrize("unit", [1, SIZE])
def test_steps_over_offloaded_layers_equal_those_over_resident_ones(unit: int) -> None:
    above, below, pages = make_caches()
    loads = Prefetcher(below, num_rows=2, token_budget=BUDGET)
    for layer in (2, 1, 0):
        loads.offload(layer, PinnedTier())
    assert below.keys[0].device.type == "cpu"
    table, random = on_device([pages]), torch.Generator().manual_seed(0)
    for step in range(20):
        length = LENGTH + step
        lengths = on_device([length])
        loads.begin(on_device([1], torch.int64), table, lengths)
        newest = (length - 1) // unit
        others = torch.randperm(newest, generator=random)[: BUDGET // unit - 1]
        entries = [[sorted([*others.tolist(), newest])]]
        count = on_device([[len(entries[0][0])]])
        selection = Selection(on_device(entries), count, unit)
        loads.start(selection, range(1, 3))
        slot = on_device([pages[(length - 1) // SIZE] * SIZE + (length - 1) % SIZE], torch.int64)
        for layer, layout in enumerate(LAYERS):
            key = torch.randn(1, layout.num_kv_heads, layout.key_dim, device=DEVICE)
            value = None
            if not layout.shared_values:
                value = torch.randn(1, layout.num_kv_heads, layout.value_dim, device=DEVICE)
            for cache in (above, below):
                values = None if value is None else cache.values[layer]
                kernels.append(cache.keys[layer], values, key, value, slot)
            resident = loads.wait(layer, selection)
            resident.append(key, value)
            query = torch.randn(1, 4, layout.key_dim, device=DEVICE)
            found = kernels.attend(
                (query, *resident.paged), selection=resident.selection, scale=0.1
            )
            paged = query, above.keys[layer], above.values[layer], table, lengths
            wanted = kernels.attend(paged, selection=selection, scale=0.1)
            # To the last bit: a policy may choose otherwise after another rounding.
            assert torch.equal(found, wanted)
        assert len(loads.count(loads.end())) == 1
    assert loads.total.hits > 0
    loads.close()


def test_all_operations_read_and_write_offloaded_pages() -> None:
    above, below, pages = make_caches()
    below.offload_layer(0, PinnedTier())
    query = torch.randn(1, 4, 64, device=DEVICE)
    rows = torch.randn(7, 4, 64, device=DEVICE)
    requests = (ScoreRequest("max", SIZE),)
    found = []
    for cache in (above, below):
        keys, values = cache.keys[0], cache.values[0]
        paged = query, keys, values, on_device([pages]), on_device([LENGTH])
        bounds = [torch.zeros(len(keys), 2, 64, device=DEVICE) for _ in range(2)]
        order = on_device(pages, torch.int64)
        kernels.page_bounds(keys, *bounds, order, torch.full_like(order, SIZE))
        out, scores = kernels.attend_and_score(paged, requests=requests, scale=0.1)
        slots = order[:5] * SIZE + 3
        new = torch.arange(5 * 2 * (64 + 32), device=DEVICE).view(5, 2, -1) / 1000
        kernels.append(keys, values, new[..., :64], new[..., 64:], slots)
        selection = Selection(on_device([[[3, 40, 41, LENGTH - 1]]]), on_device([[4]]), 1)
        torch.cuda.synchronize()  # pages below are looked at by the host
        found.append(
            [
                keys.cpu(),
                values.cpu(),
                kernels.attend(paged, selection=selection, scale=0.1),
                kernels.attend(paged, scale=0.1),
                kernels.attend(paged, scale=0.1, window=50),
                kernels.prefill(rows, keys, values, order, LENGTH - 7, scale=0.1),
                out,
                *scores,
                *bounds,
            ]
        )
    for a, b in zip(*found, strict=True):
        assert not b.isnan().any()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_layers_become_resident_again_from_pinned_memory() -> None:
    """What was written below by the device is above again, in fewer pages with other numbers."""
    above, below, pages = make_caches()
    loads = Prefetcher(below, num_rows=2, token_budget=BUDGET)
    for layer in (2, 1):
        loads.offload(layer, PinnedTier())
    slots = on_device(pages[40:], torch.int64) * SIZE + 5
    for layer, layout in enumerate(LAYERS):
        key = torch.randn(len(slots), layout.num_kv_heads, layout.key_dim, device=DEVICE)
        value = None
        if not layout.shared_values:
            value = torch.randn(len(slots), layout.num_kv_heads, layout.value_dim, device=DEVICE)
        for cache in (above, below):
            values = None if value is None else cache.values[layer]
            kernels.append(cache.keys[layer], values, key, value, slots)
    below.release(pages[:40])
    numbers = below.pack()
    below.cut(12)
    for layer in (1, 2):
        loads.restore(layer)
    assert loads.layers == below.offloaded_layers == ()
    kept = [numbers.get(page, page) for page in pages[40:]]
    for layer in range(len(LAYERS)):
        assert below.keys[layer].device.type == DEVICE
        assert len(below.keys[layer]) == 12
        assert torch.equal(below.keys[layer][kept], above.keys[layer][pages[40:]])
        assert torch.equal(below.values[layer][kept], above.values[layer][pages[40:]])
    loads.close()

"""Benchmarks on a GPU: every headline setting in small, and peers that only a GPU has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.offload import loading
from benchmarks.paper import setting
from benchmarks.paper.settings import HEADLINES
from keyhole.bench.flashinfer_baseline import is_installed
from keyhole.bench.model import RandomKV, make_weights, prompts
from keyhole.bench.settings import ALL_BASELINES, MORE_BASELINES, DecodeSettings
from keyhole.bench.systems import Baseline, BaselineCache
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.cache.pages import PageCache
from keyhole.cache.prefetch import Prefetcher
from keyhole.cache.tiers import PinnedTier
from keyhole.kernels import Selection
from tests.gpu.streams import beside_each_other

pytestmark = pytest.mark.gpu

CONTEXT, STEPS = 64, 8
DEVICE = "cuda"


@pytest.mark.parametrize("name", HEADLINES)
def test_a_headline_setting_runs_in_small(name: str) -> None:
    line = setting.measured(name, "cuda", lambda *_: None, small=True)
    wanted = {n for target in HEADLINES[name].targets for n in (target.of, target.by) if n}
    assert wanted <= set(line["speeds"])


@pytest.fixture
def peers() -> tuple[list[Baseline], list[list[int]], list[int]]:
    """All peers over the same numbers, each with a cache of its own."""
    asked = DecodeSettings(contexts=(CONTEXT,), shape="smoke", device="cuda")
    weights = make_weights(asked)
    numbers = RandomKV(weights.keyhole, 2, CONTEXT)
    found = []
    for name, (_, kind) in ALL_BASELINES.items():
        if name == "flashinfer" and not is_installed():
            continue
        past = BaselineCache(kind, weights.keyhole, CONTEXT, STEPS)
        past.fill(numbers)
        found.append(Baseline(name, weights, past, CONTEXT))
    return found, *prompts(weights.keyhole, 2, CONTEXT, 3)


def test_all_peers_agree(peers: tuple[list[Baseline], list[list[int]], list[int]]) -> None:
    found, texts, given = peers
    expected, *others = [peer.logits(texts, given) for peer in found]
    for other in others:
        torch.testing.assert_close(other, expected, rtol=0.1, atol=0.1)


def test_a_captured_step_is_the_step_again_and_again(
    peers: tuple[list[Baseline], list[list[int]], list[int]],
) -> None:
    found, texts, _ = peers
    (flash,) = (peer for peer in found if peer.name == next(iter(MORE_BASELINES)))
    flash.start(texts, STEPS)
    assert flash._captured is not None
    for _ in range(3):
        given = flash._next.clone()
        expected = flash._forward(given).argmax(-1)
        flash._past.take_back(1)
        flash.step()
        flash.rest()
        assert torch.equal(flash._next, expected)
        assert flash._past.cache.get_seq_length() == CONTEXT


def test_a_trace_shows_what_ran_on_the_gpu(tmp_path: Path) -> None:
    numbers = torch.ones(1 << 20, device="cuda")
    loading.write(tmp_path / "trace.json", lambda: numbers.mul(2), torch.device("cuda"))
    assert '"cat": "kernel"' in (tmp_path / "trace.json").read_text()


def test_elastic_loads_overlap_with_other_work(tmp_path: Path) -> None:
    """Some 1,500 tokens of a layer are new in a step: 12 MB, which take longer than a launch."""
    size, num_pages, budget, heads = 16, 512, 2048, 8
    layout = LayerLayout(num_kv_heads=heads, key_dim=128, value_dim=128)
    layers = (layout,) * 4
    geometry = Geometry(layers=layers, num_query_heads=heads, page_size=size, itemsize=4)
    cache = PageCache(geometry, num_pages, dtype=torch.float32, device=torch.device(DEVICE))
    loads = Prefetcher(cache, num_rows=1, token_budget=budget)
    pages = cache.allocate(num_pages)
    assert pages is not None
    for layer in reversed(range(len(layers))):
        loads.offload(layer, PinnedTier())
    length = num_pages * size
    rows = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    table = torch.tensor([pages], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    count = torch.full((1, heads), budget, dtype=torch.int32, device=DEVICE)
    numbers = torch.randn(4096, 4096, device=DEVICE)

    def step() -> None:
        others = torch.rand(1, heads, length - 1, device=DEVICE).topk(budget - 1).indices.sort()[0]
        newest = torch.full((1, heads, 1), length - 1, device=DEVICE)
        selection = Selection(torch.cat([others, newest], -1).int(), count, 1)
        loads.begin(rows, table, lengths)
        loads.start(selection, range(len(layers)))
        for _ in range(4):
            torch.matmul(numbers, numbers)
        for layer in range(len(layers)):
            loads.wait(layer, selection)
        loads.count(loads.end())

    step()  # compiles
    file = tmp_path / "trace.json"
    loading.write(file, step, torch.device(DEVICE))
    loads.close()
    assert loads.total.misses > 0
    assert beside_each_other(file)

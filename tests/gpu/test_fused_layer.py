"""Decoder layers of few launches on a GPU: captured in graphs, as exact as transformers' own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keyhole import Full, SamplingParams
from keyhole.kernels.triton import overlap
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.models.modules import fused_layer
from keyhole.models.modules.fused_layer import Choice
from tests.gpu.test_device import checkpoint, tokens
from tests.policies.recording import make_engine, run

pytestmark = pytest.mark.gpu

ALL = frozenset({1, 2, 4})


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    with overlap.using(False):
        yield


def logits(model: Model, batch: int) -> Tensor:
    """Of prompts of different lengths and of nine tokens after each; a GPU replays its steps."""
    engine = make_engine(model, Full(), max_batch=4)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    given = tokens(9, seed=7)
    requests = [
        engine.add(tokens(40 + 9 * i, seed=i), params, given=given, keep_logits=True)
        for i in range(batch)
    ]
    run(engine)
    assert (engine.replayed_steps > 0) == (model.device.type == "cuda")
    return torch.stack([torch.stack(request.logits) for request in requests]).float().cpu()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_fused_model_is_as_close_to_float32_as_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, batch: int, overlapped: bool
) -> None:
    if overlapped and not overlap.is_possible():
        pytest.skip("needs compute capability 9.0")
    path = checkpoint("llama", tmp_path)
    exact = logits(load(path, "cpu", "float32"), batch) if batch == 1 else None
    monkeypatch.setattr(fused_layer, "measured", lambda layers: Choice(frozenset(), overlap=False))
    stock = logits(load(path, "cuda", dtype), batch)
    choice = Choice(ALL, overlap=overlapped)
    monkeypatch.setattr(fused_layer, "measured", lambda layers: choice)
    model = load(path, "cuda", dtype)
    assert fused_layer.fused_tokens(model.network) == sorted(ALL)
    fused = logits(model, batch)
    allowed = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}[dtype] * stock.abs().max()
    assert (fused - stock).abs().max() <= allowed
    if exact is not None:
        assert (fused - exact).abs().mean() <= 1.5 * (stock - exact).abs().mean() + 1e-5


def test_the_choice_is_measured_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = load(checkpoint("llama", tmp_path), "cuda", "bfloat16")
    assert set(fused_layer.fused_tokens(model.network)) <= ALL
    assert len(fused_layer.fusible(model.network)) == model.network.config.num_hidden_layers

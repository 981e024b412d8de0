"""FlashInfer's dense steps are a baseline where it is installed; here a stand-in computes them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole.bench import decode, model
from keyhole.bench.settings import DecodeSettings
from keyhole.bench.systems import Baseline, BaselineCache
from keyhole.errors import ConfigError

CONTEXT, STEPS = 48, 12


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("stand_in")))
    found: Any = importlib.import_module("flashinfer")
    found.planned.clear()
    yield found
    del sys.modules["flashinfer"]


def settings(**given: Any) -> DecodeSettings:
    usual = {"contexts": (CONTEXT,), "shape": "smoke", "device": "cpu", "repeat": 2}
    return DecodeSettings(**usual | given)


@pytest.mark.parametrize("batch", [1, 2])
def test_its_steps_give_the_logits_of_transformers(package: Any, batch: int) -> None:
    weights = model.make_weights(settings(dtype="float32", layers=2))
    numbers = model.RandomKV(weights.keyhole, batch, CONTEXT)
    texts, given = model.prompts(weights.keyhole, batch, CONTEXT, 3)
    found = []
    for name, kind in (("transformers_sdpa", "dynamic"), ("flashinfer", "in_pages")):
        past = BaselineCache(kind, weights.keyhole, CONTEXT, STEPS)
        past.fill(numbers)
        found.append(Baseline(name, weights, past, CONTEXT))
        assert past.num_bytes > 0
    expected, logits = (peer.logits(texts, given) for peer in found)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    # Once for each length, not for each layer.
    lengths = [CONTEXT + i for i in range(1, 2 + len(given))]
    assert package.planned == [[length] * batch for length in lengths]
    peer = found[1]
    peer.start(texts, 3)
    for _ in range(3):
        peer.step()
        peer.rest()
    assert package.planned[len(lengths) :] == [[CONTEXT + 1] * batch]
    assert peer._past.cache.get_seq_length() == CONTEXT


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_it_is_timed_beside_the_others() -> None:
    line = decode.run(settings(systems=("flashinfer", "full")), lambda *_: None)
    results = {result["system"]: result for result in line["results"]}
    assert list(results) == ["flashinfer", "full"]
    assert results["flashinfer"]["attended_fraction"] == 1.0
    assert set(line["relative_error"][CONTEXT]) == {"flashinfer"}


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="install it"):
        decode.run(settings(systems=("flashinfer", "full")), lambda *_: None)

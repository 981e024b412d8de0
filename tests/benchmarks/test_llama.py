"""llama.cpp computes our model over our numbers; a fake in numpy replaces it where it is absent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import benchmarks
from benchmarks.llama_cpp import __main__ as run
from benchmarks.llama_cpp import file as llama_file
from benchmarks.llama_cpp import state, worker
from benchmarks.llama_cpp.file import LlamaFile
from benchmarks.llama_cpp.system import SYSTEMS, Llama, LlamaCpp
from benchmarks.llama_cpp.worker import WorkerError, WorkerProcess
from keyhole.bench import decode, measure, model
from keyhole.bench.decode import DisagreementError, JointRun, SystemSteps
from keyhole.bench.model import Need
from keyhole.bench.settings import SHAPES, DecodeSettings
from keyhole.errors import ConfigError

CONTEXT = 64


def settings(**given: Any) -> DecodeSettings:
    usual = {
        "contexts": (CONTEXT,),
        "shape": "smoke",
        "device": "cpu",
        "dtype": "float32",
        "repeat": 2,
        "layers": 2,
        "batch": 2,
        "systems": (*SYSTEMS, "full"),
    }
    return DecodeSettings(**usual | given)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """This Python, with stand-ins for `llama_cpp` and `gguf`."""
    monkeypatch.setattr(worker, "interpreter", lambda: Path(sys.executable))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("stand_in")))


@pytest.fixture(params=["stand-in", pytest.param("llama.cpp", marks=pytest.mark.slow)])
def any_llama(request: pytest.FixtureRequest) -> None:
    """Both, where the peers' environment is there."""
    if request.param == "stand-in":
        request.getfixturevalue("stand_in")
    elif not (benchmarks.ROOT / worker.ENVIRONMENT / "bin/python").exists():
        pytest.skip("needs what `make bench-peers` sets up")


@pytest.mark.slow
@pytest.mark.usefixtures("any_llama")
@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_same_model_over_the_same_past(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two weights are equal before rounding to float16, so a misplaced one is noticed."""
    monkeypatch.setitem(SHAPES, "smoke", SHAPES["smoke"] | {"tie_word_embeddings": tied})
    line = run.run(settings(), lambda *_: None)
    assert list(line["relative_error"][CONTEXT]) == list(SYSTEMS)
    assert max(line["relative_error"][CONTEXT].values()) < 5e-3
    assert line["skipped"] == []
    assert line["llama_cpp"]["version"]
    results = {result["system"]: result for result in line["results"]}
    assert list(results) == [*SYSTEMS, "full"]
    assert len(results["full"]["all_step_ms"]) == 4  # two steps beside each of the others
    token_bytes = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, numbers, bytes of each
    for name in SYSTEMS:
        result = results[name]
        assert len(result["all_step_ms"]) == 2
        assert result["ratio_to_full"] > 0
        assert result["ratio_to_peer"] is None  # transformers was not asked for
        assert result["kv_bytes"] == 2 * (CONTEXT + 1) * token_bytes
        assert result["cache_bytes"] == 2 * 256 * token_bytes
        assert result["peak_bytes"] > result["cache_bytes"] + result["weight_bytes"]
        assert result["stated_bytes"] > result["cache_bytes"] + result["weight_bytes"]


@pytest.mark.slow
@pytest.mark.usefixtures("any_llama")
@pytest.mark.parametrize("module", [state, llama_file])
def test_keys_or_weights_in_another_order_are_refused(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "interleaved", lambda heads, _: heads)
    with pytest.raises(DisagreementError, match="llama_cpp: relative error"):
        run.run(settings(), lambda *_: None)


@pytest.mark.slow
@pytest.mark.usefixtures("any_llama")
def test_every_step_has_the_same_past() -> None:
    asked = settings()
    weights = model.make_weights(asked)
    texts, _ = model.prompts(weights.keyhole, 2, CONTEXT, 0)
    with LlamaFile() as file:
        file.write(weights)
        system = Llama("llama_cpp_flash", weights.keyhole, file, 2, CONTEXT, 4)
        system.fill(model.RandomKV(weights.keyhole, 2, CONTEXT))
        first = system.logits(texts, [])
        system.start(texts, 2)
        for _ in range(2):
            system.step()
            assert system.step_ms > 0
            system.rest()
        assert torch.equal(system.logits(texts, []), first)
        system.close()
    assert not file.path.parent.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_transformers_runs_with_each_of_them() -> None:
    asked = settings(systems=("transformers_sdpa", "llama_cpp", "quest"), batch=1)
    line = run.run(asked, lambda *_: None)
    assert [r["system"] for r in line["results"]] == ["transformers_sdpa", "llama_cpp", "quest"]
    assert line["results"][1]["ratio_to_peer"] > 0
    assert set(line["relative_error"][CONTEXT]) == {"transformers_sdpa", "llama_cpp"}


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_one_that_does_not_fit_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def needed(*_: Any) -> Need:
        return Need(stays=1 << 60, passes=0)

    monkeypatch.setattr(LlamaCpp, "needed", needed)
    line = run.run(settings(), lambda *_: None)
    assert [result["system"] for result in line["results"]] == ["full"]
    assert [entry["system"] for entry in line["skipped"]] == list(SYSTEMS)
    assert line["bars"] == []


def test_the_environment_is_asked_for_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "read_bandwidth", lambda _: pytest.fail("too late"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"\.venv-peers is not there; `make bench-peers`"):
        run.run(settings(), lambda *_: None)


def test_it_is_measured_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "device", torch.device)  # as where there is a GPU
    with pytest.raises(ConfigError, match="device 'cuda' must be cpu with llama_cpp"):
        run.run(settings(device="cuda"), lambda *_: None)


@pytest.fixture
def program(stand_in: None) -> Iterator[WorkerProcess]:
    with WorkerProcess() as running:
        yield running


def test_a_failure_in_the_other_process_is_reported(program: WorkerProcess) -> None:
    arguments = {"path": "nowhere", "cells": 256, "batch": 1, "flash": True, "threads": 1}
    with pytest.raises(
        WorkerError, match=r"`load` failed: RuntimeError: llama\.cpp could not load"
    ):
        program.call("load", arguments)
    with pytest.raises(WorkerError, match="`about` ended the program: status 1, RuntimeError"):
        program.call("about", {})


def test_a_killed_process_is_reported(program: WorkerProcess) -> None:
    program._process.kill()
    with pytest.raises(WorkerError, match="`about` ended the program: status -9"):
        program.call("about", {})


@pytest.mark.parametrize("transposed", [True, False])
def test_a_state_has_the_size_that_was_said(transposed: bool) -> None:
    weights = model.make_weights(settings())
    numbers = model.RandomKV(weights.keyhole, 3, CONTEXT)
    for sequence in range(3):
        pieces = state.pieces(numbers, sequence, transposed)
        assert sum(len(piece) for piece in pieces) == state.num_bytes(numbers)


def test_numbers_are_the_same_whenever_they_are_asked_for() -> None:
    ours = model.make_weights(settings()).keyhole
    one, other = (model.RandomKV(ours, 2, CONTEXT) for _ in range(2))
    assert torch.equal(one.keys(1, 1), other.keys(1, 1))
    drawn = [draw(layer, b) for draw in (one.keys, one.values) for layer in (0, 1) for b in (0, 1)]
    assert len({float(tensor[0, 0, 0]) for tensor in drawn}) == 8


def test_ratios_are_taken_within_a_run() -> None:
    """The machine may be slower in one of them."""

    def measured(ms: float) -> SystemSteps:
        return SystemSteps(step_ms=[ms, ms], peak_bytes=[1], cost={})

    first = JointRun(
        measured={"full": measured(10), "llama_cpp": measured(20)}, errors={}, skipped=[]
    )
    second = replace(first, measured={"full": measured(30), "llama_cpp_flash": measured(60)})
    results = {result["system"]: result for result in decode.pooled([first, second])}
    assert results["full"]["step_ms"] == 20
    assert results["llama_cpp"]["ratio_to_full"] == 2
    assert results["llama_cpp_flash"]["ratio_to_full"] == 2

"""The kernel benchmark measures every operation on every path, and refuses what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels import run as benchmark
from benchmarks.kernels.__main__ import main
from benchmarks.kernels.layer import KernelCase, Layer
from benchmarks.kernels.linear_cases import SUM, TORCH_PACKED
from benchmarks.kernels.run import ratio_targets
from benchmarks.kernels.settings import OPS, KernelSettings
from keyhole import kernels
from keyhole.bench import measure, model
from keyhole.bench.decode import DisagreementError, relative_error
from keyhole.bench.settings import PAGE_SIZE
from keyhole.errors import CapacityError, ConfigError, UnknownNameError
from keyhole.kernels import cpu

PATHS = tuple(dict.fromkeys((cpu.paths()[0], cpu.REFERENCE)))


def settings(**given: Any) -> KernelSettings:
    usual = {"contexts": (32, 64), "batch": 2, "shape": "smoke", "repeat": 2, "paths": PATHS}
    return KernelSettings(**usual | given)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer(settings())


@pytest.fixture
def case(layer: Layer) -> Iterator[KernelCase]:
    """Attention to everything, with the path put back afterwards."""
    before = cpu.current()
    yield next(benchmark._CASES["attend"](layer))
    cpu.use(before)


def test_a_line_has_every_operation_on_every_path_and_by_a_peer() -> None:
    before, reported = cpu.current(), []
    line = benchmark.run(settings(), lambda found, _: reported.append(found))
    assert cpu.current() == before
    assert line["settings"]["paths"] == PATHS
    assert line["read_bytes_per_s"] > 0
    assert [found[0]["op"] for found in reported] == list(OPS)
    assert [result for found in reported for result in found] == line["results"]
    cases = {(r["op"], r["about"]) for r in line["results"]}
    # attend in three ways, top_k in two, linear in five, packed_linear of five matrices in twenty
    assert len(cases) == len(OPS) + 26
    for op, about in cases:
        found = {r["system"]: r for r in line["results"] if (r["op"], r["about"]) == (op, about)}
        assert set(PATHS) < set(found)
        arithmetic = op in ("prefill", "attend_low_rank")
        for result in found.values():
            assert result["ratio_to_peer"] == pytest.approx(1) or result["system"] != result["peer"]
            assert result["peer"] in found
            assert result["ms"] >= result["least_ms"] > 0
            assert result["rounds"] == 2
            assert result["moved_bytes"] > 0
            assert (result["gb_per_s"] is None) == arithmetic
            assert (result["bandwidth_share"] is None) == arithmetic
            if not arithmetic:
                copied = 1e9 * result["gb_per_s"] / line["copy_bytes_per_s"]
                assert result["copy_share"] == pytest.approx(copied)
            assert (result["gflop_per_s"] is None) != arithmetic
            assert (result["sum_share"] is None) == (op not in ("linear", "packed_linear"))
        if SUM in found:
            assert found[SUM]["sum_share"] == 1
        if about.endswith(("in int4", "in int8")):  # the same weights, so the same results
            assert found[TORCH_PACKED]["peer"] == TORCH_PACKED
            assert 0 < found[TORCH_PACKED]["relative_error"] < 0.01
    names = [bar["bar"] for bar in line["bars"]]
    assert names == [
        "attend, all of 32 tokens: share of read bandwidth",
        "attend, all of 32 tokens: times torch sdpa",
        "attend, 16 tokens per KV head of 64: share of read bandwidth",
        "attend_and_score: time by that of attend",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_all_systems_agree(op: str, dtype: str) -> None:
    line = benchmark.run(settings(ops=(op,), dtype=dtype, repeat=1), lambda *_: None)
    assert {r["op"] for r in line["results"]} == {op}


def test_a_wrong_system_is_refused(case: KernelCase) -> None:
    right = case.peers["torch sdpa"]

    def wrong(i: int) -> tuple[torch.Tensor, ...]:
        (out,) = right.run(i)
        out = out.clone()
        out[1, 3] *= 1.1  # one head of one sequence
        return (out,)

    peers = {"torch sdpa": right, "wrong": replace(right, run=wrong)}
    with pytest.raises(DisagreementError, match="all of 32 tokens: wrong: relative error"):
        benchmark.measure_case(replace(case, peers=peers), PATHS, 1, 0.02)


def test_a_system_that_gives_nan_is_refused(case: KernelCase) -> None:
    right = case.peers["torch sdpa"]
    broken = replace(right, run=lambda i: (right.run(i)[0] * torch.nan,))
    with pytest.raises(DisagreementError, match="nan"):
        benchmark.measure_case(replace(case, peers={"broken": broken}), PATHS, 1, 0.02)


def test_whole_numbers_must_be_equal() -> None:
    a = torch.tensor([[3, 1000]])
    assert relative_error(a, a) == 0
    assert relative_error(a + 1, a) == float("inf")
    assert relative_error(a[:, :1], a) == float("inf")


@pytest.mark.parametrize("op", ["append", "page_bounds"])
def test_a_path_that_writes_nothing_is_seen(
    op: str, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, before = getattr(kernels, op), cpu.current()
    calls: list[str] = []

    def lazy(*given: torch.Tensor) -> None:
        calls.append(cpu.current())
        if len(calls) == 1:  # only the one that the others are compared with
            real(*given)

    (case,) = benchmark._CASES[op](layer)
    monkeypatch.setattr(kernels, op, lazy)
    with pytest.raises(DisagreementError, match=op):
        benchmark.measure_case(case, PATHS, 1, 0.02)
    assert calls[0] == cpu.REFERENCE
    cpu.use(before)


class Graphs:
    """Graphs without a GPU: a replay makes the calls again. replayed: how often."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def capture(
        self, call: Callable[[], None], device: torch.device
    ) -> tuple[Callable[[], None], None]:
        assert device.type == "cuda"
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            call()

        return replay, None


def test_on_a_gpu_a_turn_is_a_graph(case: KernelCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's launches of ten small calls were measured in place of what they compute."""
    graphs, real = Graphs(), benchmark._ready
    monkeypatch.setattr(benchmark, "capture", graphs.capture)
    monkeypatch.setattr(benchmark, "_ready", lambda call, _: real(call, torch.device("cuda")))
    found = benchmark.measure_case(case, PATHS, 2, 0.02)
    assert graphs.captured == len(found) == len(PATHS) + len(case.peers)
    assert graphs.replayed == (benchmark._WARM_UP + 2) * len(found)
    assert {result["why_not_replayed"] for result in found} == {None}
    assert benchmark._notes(found, torch.device("cuda")) == []


def test_who_cannot_be_a_graph_is_launched_and_named(
    case: KernelCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted\nmore of it")

    cuda = torch.device("cuda")
    monkeypatch.setattr(benchmark, "capture", refuse)
    ready, why_not = benchmark._ready(lambda: calls.append("called"), cuda)
    ready()
    assert (calls, why_not) == (["called"], "operation not permitted\nmore of it")
    (*_, last) = benchmark.measure_case(case, PATHS, 1, 0.02)
    (note,) = benchmark._notes([last | {"why_not_replayed": why_not}], cuda)
    assert note.endswith("cannot be a CUDA graph: operation not permitted")
    assert benchmark._notes([last], torch.device("cpu")) == []


def test_variants_do_not_overlap(layer: Layer) -> None:
    first, second = layer.tables(32)
    for row in range(layer.batch):
        assert not set(first[row].tolist()) & set(second[row].tolist())
    draws = layer.draws(64, 16, 3)
    assert len(draws) == 4
    for draw in draws:
        assert draw.shape == (2, 3, 16)
        assert (draw.diff(dim=-1) > 0).all()
        assert (draw[..., -1] == 63).all()
    places = torch.cat([draw[0, 0, :-1] for draw in draws]).tolist()
    assert len(set(places)) == len(places)


def test_keys_side_by_side_are_those_in_the_pages(layer: Layer) -> None:
    for table, (keys, _) in zip(layer.tables(32), layer.side_by_side(32), strict=True):
        assert keys.is_contiguous()
        page = layer.keys[table[1, 1]]
        assert torch.equal(keys[1, :, PAGE_SIZE:], page)


def test_bars_are_ratios_of_medians() -> None:
    def result(system: str, ms: float, **more: Any) -> dict[str, Any]:
        usual = {"op": "attend", "about": "x", "tokens": 8, "selected": None, "unit": None}
        return {**usual, "system": system, "ms": ms, "bandwidth_share": 1 / ms, **more}

    found = [
        result("best", 2.0),
        result("torch sdpa", 18.0),
        result("best", 4.0, selected=1, unit=1),
        result("best", 3.0, op="attend_and_score"),
        result("best attend", 2.0, op="attend_and_score"),
    ]
    values = [(bar["value"], bar["met"]) for bar in ratio_targets(found, "best")]
    assert values == [(0.5, False), (9.0, True), (0.25, False), (1.5, False)]
    assert ratio_targets(found, "another") == []


def test_what_does_not_fit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "free_bytes", lambda _: 1000)
    with pytest.raises(CapacityError, match="64 tokens, batch 2, need"):
        benchmark.run(settings(), lambda *_: None)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        settings(contexts=(50,))
    with pytest.raises(ConfigError, match="in ascending order"):
        settings(contexts=(64, 32))
    with pytest.raises(UnknownNameError, match="did you mean 'attend'"):
        settings(ops=("atend",))
    with pytest.raises(UnknownNameError, match="unknown path 'avx9'"):
        benchmark.run(settings(paths=("avx9",)), lambda *_: None)
    with pytest.raises(UnknownNameError, match="unknown shape"):
        settings(shape="llama")


SMALL = ("--shape", "smoke", "--contexts", "32,64", "--repeat", "1")


def test_kernels_are_shown_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)
    output = tmp_path / "kernels.jsonl"
    given = ("--ops", "append,attend_and_score", "--paths", "reference", "--note", "small")
    for _ in range(2):
        assert main([*SMALL, *given, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "torch index_copy_" in shown
    assert "reference attend" in shown
    assert "target <= 1.25" in shown
    assert shown.rstrip().endswith(f"written: {output}")
    first, second = map(json.loads, output.read_text().splitlines())
    assert first.keys() == second.keys()
    assert first["benchmark"] == "kernels"
    assert first["note"] == "small"
    assert first["settings"]["ops"] == ["append", "attend_and_score"]
    assert first["settings"]["shape"] == "smoke"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("--ops atend", "unknown operation 'atend'; did you mean 'attend'?"),
        ("--paths nowhere", "unknown path 'nowhere'"),
        ("--output nowhere/lines.jsonl", "--output 'nowhere/lines.jsonl': there is no"),
        ("--systems full", "unrecognized arguments: --systems"),
    ],
)
def test_what_is_wrong_is_said(
    given: str, error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)
    assert main([*SMALL, *given.split()]) == 2
    assert error in capsys.readouterr().err

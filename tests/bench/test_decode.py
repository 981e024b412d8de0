"""The decode benchmark measures what it says, and refuses to report when logits differ."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from keyhole.bench import decode, measure, model
from keyhole.bench import decode as bench_decode
from keyhole.bench import model as bench_model
from keyhole.bench.decode import DisagreementError
from keyhole.bench.model import Skipped, Weights, fitting, needed_bytes
from keyhole.bench.settings import (
    ALL_BASELINES,
    BASELINES,
    PAGE_SIZE,
    AdmissionSettings,
    DecodeSettings,
)
from keyhole.bench.systems import Baseline, BaselineCache, KeyholeSystem, Pages
from keyhole.config import SamplingParams
from keyhole.errors import ConfigError, UnknownNameError

CONTEXT = 64
THEIRS = (*BASELINES, "torch_flash")
STEPS = 12
KINDS = ("dynamic", "static", "in_place")


def settings(**given: Any) -> DecodeSettings:
    usual = {"contexts": (CONTEXT,), "shape": "smoke", "device": "cpu", "repeat": 2}
    return DecodeSettings(**usual | given)


@pytest.fixture
def reported() -> list[Any]:
    return []


@pytest.fixture(scope="module")
def ran() -> tuple[dict[str, Any], list[Any]]:
    """The line of a run with two contexts, and what it reported on its way."""
    reported: list[Any] = []
    asked = settings(contexts=(48, 64), batch=2, systems=(*BASELINES, "delta", "quest"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)
        return decode.run(asked, lambda *given: reported.append(given)), reported


@pytest.fixture
def line(ran: tuple[dict[str, Any], list[Any]]) -> dict[str, Any]:
    return ran[0]


def test_what_is_named_twice_is_measured_once() -> None:
    """A system named twice ended in a division by zero, a method was measured twice."""
    assert settings(systems=("quest", "Quest", "full")).systems == ("quest", "full")
    assert AdmissionSettings(methods=("reuse", "reuse")).methods == ("reuse",)


def test_a_line_has_a_result_for_every_system_and_context(line: dict[str, Any]) -> None:
    results = line["results"]
    assert [(r["context"], r["system"]) for r in results] == [
        (context, system) for context in (48, 64) for system in (*BASELINES, "delta", "quest")
    ]
    for result in results:
        assert len(result["all_step_ms"]) == 2
        assert result["launches"]["replayed_steps"] == 0  # on a CPU
        assert result["launches"]["why_not"]
        for field in ("step_ms", "gb_per_s", "bandwidth_share", "kv_bytes", "ratio_to_peer"):
            assert result[field] > 0
        if result["system"] in BASELINES:
            assert result["policy"] is None
        else:
            assert result["policy"]["name"] == result["system"]
    assert all(r["ratio_to_peer"] == 1 for r in results if r["system"] == decode.REFERENCE)


def test_a_line_has_the_conditions_of_its_measurement(
    ran: tuple[dict[str, Any], list[Any]],
) -> None:
    line, reported = ran
    assert line["settings"]["contexts"] == (48, 64)
    assert line["read_bytes_per_s"] > 0
    assert line["weight_bytes"] == 2 * line["parameters"]
    assert line["kernels"]
    assert line["skipped"] == []
    for errors in line["relative_error"].values():
        assert set(errors) == set(BASELINES)
        assert max(errors.values()) < 0.05  # bfloat16
    assert [found for found, _ in reported] == [line["results"][:5], line["results"][5:]]


def test_the_predicted_memory_is_stored_with_the_peak(line: dict[str, Any]) -> None:
    for result in line["results"]:
        parts = line["program_bytes"], line["weight_bytes"]
        parts += result["cache_bytes"], result["workspace_bytes"]
        assert result["stated_bytes"] == sum(parts)
        assert result["peak_bytes"] > 0
        token_bytes = 2 * 4 * 2 * 16 * 2  # keys and values, layers, heads, numbers, bytes of each
        assert result["cache_bytes"] >= 3 * 2 * result["context"] * token_bytes


def test_peaks_begin_anew() -> None:
    device = torch.device("cpu")
    block = torch.ones(1 << 26)  # 256 MiB, given back to the system at once
    high = bench_model.peak_bytes(device)
    del block
    bench_model.reset_peak(device)
    if bench_model._CLEAR.exists():
        assert bench_model.peak_bytes(device) < high - (128 << 20)
    assert bench_model.peak_bytes(device) >= bench_model.used_bytes(device) - (1 << 20)


@pytest.fixture(scope="module")
def small() -> Weights:
    return model.make_weights(settings(dtype="float32", layers=2))


@pytest.fixture
def systems(small: Weights) -> tuple[Pages, list[Baseline], list[list[int]], list[int]]:
    """All policies and peers over the same 64 tokens of two prompts."""
    pages = Pages(small.keyhole, ["full", "quest"], 2, CONTEXT, STEPS)
    pasts = {kind: BaselineCache(kind, small.keyhole, CONTEXT, STEPS) for kind in KINDS}
    numbers = model.RandomKV(small.keyhole, 2, CONTEXT)
    for cache in (pages, *pasts.values()):
        cache.fill(numbers)
    peers = [Baseline(name, small, pasts[ALL_BASELINES[name][1]], CONTEXT) for name in THEIRS]
    return pages, peers, *model.prompts(small.keyhole, 2, CONTEXT, 3)


def test_full_attention_and_the_peers_agree_over_the_same_cache(systems: Any) -> None:
    pages, peers, texts, given = systems
    pages.know(texts)
    errors = bench_decode.compare(pages.systems[0], peers, texts, given, 1e-4)
    assert list(errors) == list(THEIRS)
    assert max(errors.values()) < 1e-5
    again = [*peers[:2], peers[3]]  # a static cache keeps what was added
    errors = bench_decode.compare(pages.systems[0], again, texts, given, 1e-4)
    assert list(errors) == [peer.name for peer in again]


def test_a_wrong_page_is_refused(systems: Any) -> None:
    pages, peers, texts, given = systems
    pages.cache.keys[1][3, 0, 3] *= -1
    pages.know(texts)
    with pytest.raises(DisagreementError, match="transformers_sdpa: relative error"):
        bench_decode.compare(pages.systems[0], peers, texts, given, 1e-4)


def test_nothing_is_prefilled_and_every_step_reads_all(systems: Any) -> None:
    pages, _, texts, _ = systems
    pages.know(texts)
    ours: KeyholeSystem = pages.systems[0]
    ours.start(texts, 3)
    for _ in range(4):
        ours.step()
    stats = ours.sequences[0].stats()
    assert stats.cached_prompt_tokens == CONTEXT
    token_bytes = ours.engine.geometry.token_bytes
    assert stats.kv_bytes_read == token_bytes * sum(CONTEXT + n for n in (2, 3, 4))
    assert ours.cost()["kv_bytes"] == 2 * token_bytes * (CONTEXT + 3)


def test_engines_that_share_a_cache_do_not_disturb_each_other(systems: Any) -> None:
    pages, _, texts, given = systems
    pages.know(texts)
    alone = [own.logits(texts, given) for own in pages.systems]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engines = [own.engine for own in pages.systems]
    requests = [
        [engine.add(text, params, given=given, keep_logits=True) for text in texts]
        for engine in engines
    ]
    while any(engine.has_work for engine in engines):
        for engine in engines:
            engine.step()
    for sequences, expected in zip(requests, alone, strict=True):
        found = torch.stack([torch.stack(sequence.logits) for sequence in sequences])
        assert (found - expected).abs().max() < 1e-5


def test_a_peer_has_the_same_past_at_every_step(systems: Any) -> None:
    _, peers, texts, _ = systems
    for peer in (*peers[:2], peers[3]):
        peer.start(texts, 2)
        for _ in range(2):
            peer.step()
            peer.rest()
            assert peer._past.cache.get_seq_length() == CONTEXT
        assert peer.cost()["kv_bytes"] == 2 * (CONTEXT + 1) * peer._token_bytes


def test_one_cache_of_transformers_fits_but_not_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep = model.make_weights(settings(layers=8)).keyhole
    sizes = {"batch": 3, "context": 1024, "steps": STEPS}
    past = 3 * (1024 + STEPS) * deep.geometry(PAGE_SIZE).token_bytes
    ours = needed_bytes(deep, ["full", "quest"], **sizes)
    monkeypatch.setattr(bench_model, "free_bytes", lambda _: (512 << 20) + ours + 3 * past // 2)
    kept, left_out = fitting(deep, ["full", "quest"], list(BASELINES), **sizes)
    assert kept == ["transformers_sdpa", "transformers_eager"]  # these two share a cache
    assert [entry.system for entry in left_out] == ["transformers_static"]
    assert left_out[0].need_bytes > left_out[0].free_bytes
    monkeypatch.setattr(bench_model, "free_bytes", lambda _: (512 << 20) + ours)
    kept, left_out = fitting(deep, ["full", "quest"], list(BASELINES), **sizes)
    assert (kept, left_out[0].system) == ([], None)


def test_who_does_not_fit_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, reported: list[Any]
) -> None:
    sizes = {"need_bytes": 3 << 30, "free_bytes": 2 << 30}
    skipped = Skipped(context=64, batch=1, system="transformers_static", **sizes)
    monkeypatch.setattr(bench_decode, "fitting", lambda *_, **__: ([decode.REFERENCE], [skipped]))
    asked = settings(systems=("transformers_sdpa", "transformers_static", "full"))
    found = decode.run(asked, lambda *given: reported.append(given))
    assert [r["system"] for r in found["results"]] == ["transformers_sdpa", "full"]
    assert [entry["system"] for entry in found["skipped"]] == ["transformers_static"]
    assert reported[0][1] == [
        "skipped at 64 tokens, batch 1: transformers_static would need 3.0 GiB, 2.0 GiB are free"
    ]


def test_a_context_that_does_not_fit_is_skipped_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, reported: list[Any]
) -> None:
    monkeypatch.setattr(bench_model, "free_bytes", lambda _: (512 << 20) + (1 << 20))
    asked = settings(contexts=(PAGE_SIZE, 4096), systems=("full",))
    found = decode.run(asked, lambda *given: reported.append(given))
    assert [(r["context"], r["system"]) for r in found["results"]] == [(PAGE_SIZE, "full")]
    (entry,) = found["skipped"]
    assert entry["system"] is None
    assert entry["need_bytes"] > entry["free_bytes"]
    results, notes = reported[-1]
    assert results == []
    assert notes[0].startswith("skipped at 4,096 tokens, batch 1: the caches would need")


def test_without_a_peer_nothing_is_compared_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, reported: list[Any]
) -> None:
    monkeypatch.setattr(bench_decode, "fitting", lambda *_, **__: ([], []))
    found = decode.run(settings(systems=("full",)), lambda *given: reported.append(given))
    assert [(r["system"], r["ratio_to_peer"]) for r in found["results"]] == [("full", None)]
    assert reported[0][1] == ["at 64 tokens there was no baseline to compare logits with"]


def test_unknown_systems_are_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'quest'"):
        decode.run(settings(systems=("quset",)), lambda *_: None)


def test_keys_on_the_host_are_for_a_gpu(small: Weights) -> None:
    with pytest.raises(ConfigError, match="device 'cpu' must be cuda"):
        BaselineCache("offloaded", small.keyhole, CONTEXT, STEPS)


def test_a_token_budget_is_for_those_that_have_one(small: Weights) -> None:
    pages = Pages(small.keyhole, ["full", "delta"], 1, CONTEXT, STEPS, token_budget=48)
    assert [asdict(own.engine.policy).get("token_budget") for own in pages.systems] == [None, 48]
    with pytest.raises(ConfigError, match="token_budget 0 must be"):
        settings(token_budget=0)


def test_a_qwen_has_a_bias_where_qwen_has_one() -> None:
    asked = settings(shape="qwen2.5-1.5b", layers=1)
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "device", lambda _: torch.device("meta"))
        network = model.make_weights(asked).keyhole.network
    layer = network.model.layers[0]
    assert layer.self_attn.q_proj.bias.shape == (1536,)
    assert layer.self_attn.k_proj.bias.shape == (256,)
    assert layer.self_attn.o_proj.bias is None
    parameters = sum(weight.numel() for weight in layer.parameters())
    assert parameters == 2 * 1536**2 + 2 * 1536 * 256 + 2 * 256 + 1536 + 3 * 1536 * 8960 + 2 * 1536

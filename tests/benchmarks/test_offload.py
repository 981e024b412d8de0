"""Offloaded layers: all ways of loading agree, numbers add up, and the documents can show them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from benchmarks import speed_pages
from benchmarks.offload import loading
from benchmarks.offload import run as offload
from benchmarks.offload.__main__ import main
from benchmarks.offload.loading import (
    ELASTIC,
    NO_ELASTIC,
    NO_OVERLAP,
    RESIDENT,
    SYSTEMS,
    ForcedText,
    SelectionOverlap,
)
from benchmarks.offload.run import run_large
from benchmarks.offload.settings import OffloadSettings
from benchmarks.speed_pages import offload as offload_page
from keyhole.bench import measure
from keyhole.bench.decode import DisagreementError
from keyhole.bench.model import RESERVE_BYTES, Weights, make_weights
from keyhole.bench.settings import DecodeSettings
from keyhole.cache.prefetch import Prefetcher
from keyhole.cache.resident_buffer import Resident
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.kernels import Selection
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.retrieval.head import RetrievalHead


@pytest.fixture(scope="module")
def model() -> Model:
    return load(keyhole.tiny(), "cpu")


@pytest.fixture(scope="module")
def head(model: Model) -> RetrievalHead:
    return RetrievalHead.random(model.network)


def settings(**given: Any) -> OffloadSettings:
    usual = {"budgets": (64,), "words": 120, "items": 1, "repeat": 3, "shape": "smoke"}
    return OffloadSettings(**usual | given)


def smoke() -> Weights:
    return make_weights(DecodeSettings(contexts=(256,), shape="smoke", device="cpu"))


@pytest.fixture(scope="module")
def line(model: Model, head: RetrievalHead) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)
        reported: list[Any] = []
        line = offload.run(model, settings(), lambda found, _: reported.append(found), head)
    assert [result for found in reported for result in found] == line["results"]
    return line


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "layers"), [("spe_context", 6), ("delta", 3)])
def test_numbers_add_up(line: dict[str, Any], policy: str, layers: int) -> None:
    results = {r["system"]: r for r in line["results"] if r["policy"] == policy}
    assert list(results) == list(SYSTEMS)
    above, elastic = results[RESIDENT], results[ELASTIC]
    waiting, everything = results[NO_OVERLAP], results[NO_ELASTIC]
    assert above["moved_bytes"] is above["hit_rate"] is above["stall_ms"] is None
    assert above["ratio_to_resident"] == 1
    for result in (elastic, waiting, everything):
        assert result["offloaded_layers"] == layers
        assert result["steps_timed"] == 3
        assert result["step_ms"] > 0
        assert result["stall_ms"] > 0
        assert 0 < result["repeat_rate"] < 1
        assert result["repeat_rate"] == above["repeat_rate"]
    assert waiting["moved_bytes"] == elastic["moved_bytes"] < everything["moved_bytes"]
    assert everything["hit_rate"] == 0
    assert everything["steps_counted"] == line["tokens"][0] - 64
    # What was there was not moved: both say the same.
    kept = 1 - elastic["moved_bytes"] / everything["moved_bytes"]
    assert elastic["hit_rate"] == pytest.approx(kept)


@pytest.mark.slow
def test_the_settings_and_the_head_stand_in_the_line(line: dict[str, Any]) -> None:
    assert line["settings"]["budgets"] == (64,)
    assert line["head"] == "random"
    assert len(line["tokens"]) == 1
    assert 64 < line["tokens"][0] <= 120


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    asked = settings(context=256, policies=("spe_context", "quest"))
    return run_large(asked, str(tmp_path_factory.mktemp("below")))


@pytest.mark.slow
def test_a_large_model_is_measured_as_well(large: list[dict[str, Any]]) -> None:
    assert [(r["policy"], r["system"]) for r in large] == [
        (policy, system) for policy in ("spe_context", "quest") for system in SYSTEMS
    ]
    for result in large:
        assert (result["offloaded_layers"] > 0) == (result["system"] != RESIDENT)
        if result["system"] != RESIDENT:
            assert result["moved_bytes"] > 0
            assert result["relative_error"] == 0


@pytest.mark.slow
def test_a_limit_keeps_fitting_layers_resident_and_peers_are_interleaved(tmp_path: Path) -> None:
    weights = 2 * sum(x.numel() for x in smoke().keyhole.network.parameters())
    head = RetrievalHead.random(smoke().keyhole.network)
    weights += sum(x.nbytes for name, x in head.named_parameters() if "embedding" not in name)
    cache = 2 * 4 * 2 * 16 * 2 * 272  # keys and values, layers, heads, numbers, bytes, tokens
    memory = weights + RESERVE_BYTES + cache
    asked = settings(context=256, policies=("spe_context",), memory=memory)
    found = run_large(asked, str(tmp_path), ("torch_flash",))
    results = {result["system"]: result for result in found}
    assert list(results) == [*SYSTEMS, "torch_flash"]
    # The head's keys and the buffers take the room of some layers, not of all.
    (below,) = {results[name]["offloaded_layers"] for name in SYSTEMS if name != RESIDENT}
    assert 0 < below < 4
    assert results["torch_flash"]["step_ms"] > 0
    assert results["torch_flash"]["relative_error"] < 0.1
    assert results["torch_flash"]["moved_bytes"] is None
    with pytest.raises(ConfigError, match="memory 1 must be more than"):
        run_large(replace(asked, memory=1), str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("context", [None, 256])
def test_a_trace_shows_copies_overlapping_with_steps(
    model: Model, head: RetrievalHead, tmp_path: Path, context: int | None
) -> None:
    file = tmp_path / "new" / "trace.json"
    asked = settings(policies=("spe_context",), trace=str(file), context=context)
    if context is None:
        offload.run(model, asked, lambda *_: None, head)
    else:
        run_large(asked, str(tmp_path))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("ph") == "X"]
    steps = {e["name"]: e for e in events if e["name"].startswith("step ")}
    assert list(steps) == [f"step {i}" for i in range(loading.STEPS)]
    copies = [e for e in events if e["name"] == "keyhole::load_missing"]
    assert {e["tid"] for e in copies} != {steps["step 0"]["tid"]}
    for step in steps.values():
        end = step["ts"] + step["dur"]
        assert any(step["ts"] <= e["ts"] <= e["ts"] + e["dur"] <= end for e in copies)


@pytest.mark.slow
def test_another_result_is_not_timed(
    model: Model, head: RetrievalHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Prefetcher):
        def wait(self, layer: int, selection: Selection) -> Resident:
            resident = super().wait(layer, selection)
            resident.values.zero_()
            return resident

    monkeypatch.setattr(offload, "SYSTEMS", {**SYSTEMS, NO_OVERLAP: Wrong})
    monkeypatch.setattr(offload, "_timed", lambda *_: pytest.fail("too late"))
    with pytest.raises(DisagreementError, match=f"spe_context, {NO_OVERLAP}"):
        offload.run(model, settings(), lambda *_: None, head)


def test_repeats_are_counted_per_layer_and_head() -> None:
    def selection(*lists: list[int]) -> Selection:
        return Selection(torch.tensor([lists]).int(), torch.tensor([[3, 2]]).int(), 1)

    repeats = SelectionOverlap()
    first = selection([1, 4, 7], [0, 2, -1])
    second = selection([1, 5, 7], [3, 4, -1])
    for chosen in (first, second):
        repeats.begin()
        repeats.record(0, chosen)
    assert (repeats.selected, repeats.repeated) == (5, 2)  # the padding is no entry
    repeats.record(1, second)  # another layer's first
    for _ in range(2):
        repeats.begin()
    repeats.record(0, first)  # after a step that read everything
    repeats.forget()
    repeats.begin()
    repeats.record(0, first)  # another sequence
    assert (repeats.selected, repeats.repeated) == (5, 2)
    assert repeats.steps == 4


def test_the_last_tokens_of_a_text_become_its_answer() -> None:
    text = ForcedText(prompt=[1, 2, 3], answer=[4, 5])
    assert text.last(1) == ForcedText(prompt=[1, 2, 3, 4], answer=[5])
    assert len(text.last(4)) == len(text) == 5


def test_what_cannot_be_measured_is_refused_at_once(
    model: Model, head: RetrievalHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "read_bandwidth", lambda _: pytest.fail("too late"))
    for given, error in (
        ({"budgets": (64, 1024)}, "words 120 must be large enough"),
        ({"policies": ("delta", "nobody")}, "unknown policy 'nobody'"),
        ({"policies": ("quest:bugdet=1",)}, "unknown setting of policy quest 'bugdet'"),
    ):
        with pytest.raises((ConfigError, UnknownNameError), match=error):
            offload.run(model, settings(**given), lambda *_: None, head)
    wrong = ({"budgets": (64, 32)}, {"budgets": ()}, {"items": 0}, {"words": 50}, {"memory": 1})
    for given in (*wrong, {"policies": ()}, {"context": 50}):
        with pytest.raises(ConfigError, match=f"{next(iter(given))} "):
            settings(**given)


def test_a_file_of_others_is_not_replaced_by_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    file.write_text("a letter")
    lines = str(tmp_path / "lines.jsonl")
    assert main(["--trace", str(file), "--output", lines, "--device", "cpu"]) == 2
    assert "exists and is not a Chrome trace" in capsys.readouterr().err
    assert file.read_text() == "a letter"


def test_without_a_head_the_command_that_makes_one_is_named(
    model: Model,
) -> None:
    with pytest.raises(ConfigError, match="keyhole train-head"):
        offload.run(replace(model, head=None), settings(), lambda *_: None)


@pytest.mark.slow
def test_documents_show_a_line(
    line: dict[str, Any], large: list[dict[str, Any]], tmp_path: Path
) -> None:
    line = line | {"large": large, "settings": line["settings"] | {"context": 256}}
    stored = measure.header("offload", torch.device("cpu"), "a note") | line
    page = speed_pages.page([], [], [stored | {"commit": "old"}, stored | {"commit": "new"}])
    assert page.count("## Offloaded layers") == 1
    assert "commit new" in page
    assert "commit old" not in page
    assert page.count("| `delta` | 64 |") == 2
    assert "| `quest` | everything copied | " in page
    assert "6 layers under `spe_context`, 3 layers under `delta`" in page
    offload_page.curve(stored, tmp_path / "images" / offload_page.PICTURE)
    hops = stored | {"model": "keyhole-hops"}
    both = speed_pages.page([], [], [hops, stored])
    assert "## Offloaded layers of `keyhole-hops`" in both
    assert "images/offload-keyhole-hops.png" in both
    assert both.count("images/offload.png") == 1
    picture = (tmp_path / "images" / offload_page.PICTURE).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert stored["date"].encode() in picture

"""Decode steps that are repeated from a recording leave what steps launched one by one leave.

Here a recording is run again over its fixed inputs (`RunAgain`); tests/gpu has CUDA graphs.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keyhole
from keyhole import LLM, Delta, Full, Policy, Quest, RaaS, SamplingParams, ShadowKV, SpeContext
from keyhole.engine.cuda_graph_runner import GraphBuffers, batch_bucket, width_bucket
from keyhole.kernels import cpu
from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import make_model
from tests.engine.pair import (
    AGAIN,
    CAPTURABLE,
    COMING,
    POLICIES,
    SMALL,
    Pair,
    left,
    model,
    models,
    recorded_engine,
    same,
    small,
    steps_of,
    zeros,
)
from tests.policies.models import prompt
from tests.policies.recording import PAGE, Recording, make_engine

__all__ = ["model", "models", "zeros"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURABLE)
def test_repeated_steps_leave_what_single_steps_leave(
    monkeypatch: pytest.MonkeyPatch, model: Model, name: str
) -> None:
    """Bit by bit: tokens, logits, keys, side data, state, pages, counters, after every step.

    Hooks see the host's numbers of the step that was recorded, and would go wrong by others.
    """
    pair = Pair(monkeypatch, model, small(name))
    pair.run()
    recorder = pair.recorder
    assert pair.engine.cache.capacity > 64  # the first tensors were too small
    assert recorder.forgotten == 1
    assert pair.engine.replayed_steps == recorder.repeated > 30
    # Few recordings serve many steps.
    assert recorder.recorded <= 20
    if name == "raas":
        assert all(other.evicted_pages for _, other in pair.requests)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "latent"])
@pytest.mark.parametrize("name", ["delta", "quest", "spe_context", "raas"])
def test_other_kinds_of_attention_are_repeated_too(
    monkeypatch: pytest.MonkeyPatch, models: dict[str, Model], kind: str, name: str
) -> None:
    pair = Pair(monkeypatch, models[kind], small(name))
    pair.run(((0, 3, 30), (2, 40, 20)))
    assert pair.recorder.repeated > 20


SETTINGS: list[Policy] = [
    SpeContext(token_budget=20, refresh_every=4),
    SpeContext(token_budget=20, recall=0.8),
    Delta(token_budget=20, recall=0.8, delta_layers=(2,)),
    RaaS(token_budget=20, alpha=0.05),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("policy", SETTINGS, ids=str)
def test_settings_with_more_ways_to_go_are_repeated_too(
    monkeypatch: pytest.MonkeyPatch, model: Model, policy: Policy
) -> None:
    pair = Pair(monkeypatch, model, policy)
    pair.run(((0, 3, 32), (4, 26, 20)))
    assert pair.recorder.repeated > 25


#: All policies that may have offloaded layers; ShadowKV if it keeps full keys.
BELOW = {name: small(name) for name in CAPTURABLE if name not in ("full", "raas", "r_kv")} | {
    "shadowkv": ShadowKV(**SMALL, rank=0),
    "delta": Delta(**SMALL, full_layers=(), delta_layers=(1,)),
}


def offload_settings(model: Model, policy: Policy, folder: Path, max_batch: int) -> dict[str, Any]:
    """The least memory with room for all of `COMING` once the last layer is below."""
    wanted = sum(-(-(length + count) // PAGE) for _, length, count in COMING[:max_batch]) + 1
    page_bytes = make_engine(model, policy).cache.page_bytes
    settings = {"offload": str(folder)}

    def room(pages: int) -> int:
        memory = pages * page_bytes
        # A row of buffers more, as where steps are recorded.
        engine = make_engine(model, policy, **settings, memory=memory, max_batch=max_batch + 1)
        return engine.cache.max_pages

    tried = range(wanted // 4, wanted + 20)
    least = tried[bisect.bisect_left(tried, wanted, key=room)]
    return {**settings, "memory": least * page_bytes, "max_batch": max_batch}


@pytest.mark.slow
@pytest.mark.parametrize("name", BELOW)
def test_steps_with_layers_below_are_repeated_too(
    monkeypatch: pytest.MonkeyPatch, model: Model, tmp_path: Path, name: str
) -> None:
    """Bit by bit, with what stands in the buffers, while layers go down, come up, and go down.

    What was recorded is forgotten each time, though a buffer that is gone counts its cuts no more.
    """
    settings = offload_settings(model, BELOW[name], tmp_path, max_batch=4)
    pair = Pair(monkeypatch, model, BELOW[name], **settings)
    pair.run(AGAIN)
    assert pair.came_up
    done = [other.counters for _, other in pair.requests]
    assert all(counters.misses for counters in done)
    assert any(counters.hits for counters in done)
    assert pair.recorder.repeated > pair.repeated_below  # while all was above, too
    assert (pair.repeated_below > 10) == (not BELOW[name].reads_keys)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "name"),
    # Not SpeContext's lists per query head over latents: buffers for them are all the memory.
    [(k, n) for k in ("windows", "latent") for n in ("delta", "quest", "spe_context")][:-1],
)
def test_other_kinds_of_attention_below_are_repeated_too(
    monkeypatch: pytest.MonkeyPatch,
    models: dict[str, Model],
    tmp_path: Path,
    kind: str,
    name: str,
) -> None:
    settings = offload_settings(models[kind], BELOW[name], tmp_path, max_batch=2)
    pair = Pair(monkeypatch, models[kind], BELOW[name], **settings)
    pair.run(((0, 3, 60), (9, 90, 51)))
    assert pair.repeated_below > 10


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", [Delta(token_budget=20), RaaS(token_budget=20)], ids=str)
def test_a_sequence_that_makes_room_for_others_is_repeated_again(
    monkeypatch: pytest.MonkeyPatch, model: Model, policy: Policy
) -> None:
    """It enters anew, into a row of state and of the page table that another one has left."""
    bytes_per_page = make_engine(model, policy).cache.page_bytes
    pair = Pair(monkeypatch, model, policy, memory=31 * bytes_per_page, max_batch=2)
    replays = [0]
    schedule = pair.engine.scheduler.schedule

    def counted() -> Any:
        plan = schedule()
        replays[0] += len(plan.preempted)
        return plan

    monkeypatch.setattr(pair.engine.scheduler, "schedule", counted)
    pair.run(((0, 30, 50), (1, 33, 40), (2, 5, 20)))
    assert pair.recorder.repeated > 50
    assert replays[0] or policy.name == "raas"  # whose sequences stay small


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [name for name in CAPTURABLE if name != "infllm"])
def test_rows_of_nobody_change_nothing(
    monkeypatch: pytest.MonkeyPatch, model: Model, name: str
) -> None:
    """Three sequences in a recording for four. Products of four rows are rounded otherwise.

    Not for infllm: of two keys in a page both are as far from their mean, and rounding decides.
    """
    pair = Pair(monkeypatch, model, small(name), max_batch=5)
    pair.run(((0, 3, 14), (1, 18, 13), (1, 31, 10)), within=1e-4)
    assert any(key[0] == 4 for key in steps_of(pair.engine)._shapes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURABLE)
def test_what_stands_in_the_rows_of_nobody_reaches_no_one(
    monkeypatch: pytest.MonkeyPatch, model: Model, name: str
) -> None:
    """Bit by bit, with another token there, and a page and a row of state full of garbage."""
    logits, contents = [], []
    for token in (0, 7):
        engine, _ = recorded_engine(
            monkeypatch, lambda: make_engine(model, small(name), max_batch=5)
        )
        steps_of(engine)._padding_row["token_ids"] = token
        if token:
            aside = engine.cache.set_aside()
            for tensor in engine.cache._tensors():
                tensor[aside] = torch.randn_like(tensor[aside])
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        requests = [engine.add(prompt(n), params, keep_logits=True) for n in (3, 18, 31)]
        while engine.has_work:
            running = [left(engine, x) for x in requests if x.slot >= 0 and x.num_computed]
            contents.append(running)
            engine.step()
        logits.append([torch.stack(request.logits) for request in requests])
    same(*logits, 0.0)
    half = len(contents) // 2
    for one, other in zip(contents[:half], contents[half:], strict=True):
        for x, y in zip(one, other, strict=True):
            same(x, y, 0.0)


@pytest.mark.slow
def test_a_recording_reads_its_fixed_inputs_alone(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    """Numbers of the host that are spoilt after recording change nothing."""
    pair = Pair(monkeypatch, model, Quest(token_budget=20))
    load_inputs, send_inputs = GraphBuffers.load, GraphBuffers.send

    def spoil(arrays: Iterable[np.ndarray]) -> None:
        for array in arrays:
            array.fill(1 << 20 if array.dtype != bool else 1)

    def load(inputs: GraphBuffers, arrays: dict[str, np.ndarray]) -> None:
        load_inputs(inputs, arrays)
        spoil(arrays.values())

    def send(inputs: GraphBuffers) -> None:
        send_inputs(inputs)
        spoil(inputs._arrays.values())

    monkeypatch.setattr(GraphBuffers, "load", load)
    monkeypatch.setattr(GraphBuffers, "send", send)
    pair.run(((0, 3, 30), (2, 40, 20)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CAPTURABLE)
def test_what_a_gpu_leaves_to_the_reference_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, model: Model, name: str
) -> None:
    """C++ is one operation to who watches; a GPU computes top-k and more by plain PyTorch."""
    monkeypatch.setattr(cpu, "takes", lambda *_: False)
    engine, recorder = recorded_engine(monkeypatch, lambda: make_engine(model, small(name)))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    for length in (18, 26):
        engine.add(prompt(length), params)
    while engine.has_work:
        engine.step()
    assert recorder.repeated >= 4


def test_a_policy_that_goes_by_numbers_of_the_host_without_saying_so_is_found(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    """The comparison above has teeth: without its branch, delta reads as it did when recorded."""
    monkeypatch.setattr(Delta, "capture_key", lambda *_: ())
    pair = Pair(monkeypatch, model, Delta(token_budget=20, delta_layers=(2,)))
    with pytest.raises(AssertionError):
        pair.run(((0, 3, 30),))


def test_policies_do_not_claim_it_unasked(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    """One that is written elsewhere may shape tensors by numbers of the host: it runs as ever."""
    ours = {name for name, cls in POLICIES.items() if cls.__module__.startswith("keyhole.")}
    assert ours <= set(CAPTURABLE)
    assert isinstance(Policy.capturable, str)
    seen = Recording(inner=Full())
    engine, recorder = recorded_engine(monkeypatch, lambda: make_engine(model, seen))
    engine.add(prompt(9), SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert recorder.recorded == 0
    assert len(seen.calls) == 3 * 4


@pytest.mark.one_in(3)
@pytest.mark.parametrize("settings", [{}, {"keep_generated": True}, {"rank": 0}], ids=str)
def test_shadowkv_decomposes_in_steps_of_its_own(
    monkeypatch: pytest.MonkeyPatch, model: Model, settings: dict[str, Any]
) -> None:
    """And is not recorded where it reads all generated tokens: their number is a shape."""
    pair = Pair(monkeypatch, model, ShadowKV(token_budget=20, chunk_size=4, **settings))
    pair.run(((0, 3, 32), (4, 26, 20)))
    assert (pair.recorder.repeated > 20) == ("keep_generated" not in settings)


def test_graphs_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    engine, recorder = recorded_engine(
        monkeypatch, lambda: LLM(model, graphs=False, page_size=PAGE, memory="16MiB").engine
    )
    engine.add(prompt(9), SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert recorder.recorded == 0
    assert engine._runner._recorded is None


def test_a_model_that_waits_for_the_device_is_run_step_by_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As some experts do; there is one warning, and the numbers are right."""
    model = load(make_model("llama", tmp_path), "cpu", "float32")
    model.network.model.norm.register_forward_hook(lambda _, __, out: out * (out.sum().item() != 0))
    pair = Pair(monkeypatch, model, Full())
    with pytest.warns(RuntimeWarning, match="cannot be recorded .* waits for the device") as found:
        pair.run(((0, 3, 20), (2, 40, 10)))
    assert len(found) == 1
    assert pair.recorder.repeated == 0
    assert steps_of(pair.engine).why_not is not None


def test_rope_that_follows_the_length_is_replayed_up_to_its_threshold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The code of transformers waits for the longest position, ours knows it."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    path = make_model("llama", tmp_path, rope_parameters=rope, max_position_embeddings=32)
    pair = Pair(monkeypatch, load(path, "cpu", "float32"), Full())
    pair.run(((0, 3, 20),))
    replayed = pair.recorder.repeated
    assert replayed > 0
    pair.run(((0, 40, 10),))
    assert pair.recorder.repeated == replayed


def test_of_a_recording_that_fails_the_first_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    """A failed capture also fails when it ends, with a less useful error."""
    pair = Pair(monkeypatch, model, Full())

    def record(work: object) -> object:
        try:
            raise RuntimeError("asked for a number")
        finally:
            raise RuntimeError("failed due to a previous error")

    monkeypatch.setattr(pair.recorder, "record", record)
    with pytest.warns(RuntimeWarning, match="launched one by one, .* asked for a number"):
        pair.run(((0, 3, 10),))
    assert steps_of(pair.engine).why_not == "asked for a number"


def test_a_cache_of_one_page_has_none_for_nobody(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    page_bytes = make_engine(model, Full()).cache.page_bytes
    engine, recorder = recorded_engine(
        monkeypatch, lambda: make_engine(model, Full(), memory=page_bytes)
    )
    request = engine.add([5], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert len(request.generated) == 3
    assert (engine.max_pages, recorder.recorded) == (1, 0)


def test_the_page_of_nobody_is_not_offered_to_sequences(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    page_bytes = make_engine(model, Full()).cache.page_bytes
    engine, _ = recorded_engine(
        monkeypatch, lambda: make_engine(model, Full(), memory=4 * page_bytes)
    )
    assert engine.max_pages == engine.cache.max_pages == engine.cache.available == 3
    with pytest.raises(keyhole.CapacityError):
        engine.add(prompt(3 * PAGE), SamplingParams(max_tokens=1))
    request = engine.add(prompt(3 * PAGE - 1), SamplingParams(max_tokens=1, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert request.finish_reason == "length"
    assert engine.cache.peak_pages == 3


@pytest.mark.slow
def test_shapes_that_were_not_used_for_long_are_given_up(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    monkeypatch.setattr("keyhole.engine.cuda_graph_runner._MOST", 2)
    pair = Pair(monkeypatch, model, Full())
    pair.run()
    assert len(steps_of(pair.engine)._shapes) == 2


def test_buckets_hold_what_they_are_for_and_little_more() -> None:
    for most in (1, 3, 8, 20, 64):
        for count in range(1, most + 1):
            rows = batch_bucket(count, most)
            assert count <= rows <= most
            assert rows < 2 * count
            assert rows - count < 8
    for pages in range(1, 5000):
        wide = width_bucket(pages)
        assert pages <= wide
        assert wide <= max(16, 1.25 * pages + 16)
    assert len({width_bucket(pages) for pages in range(1, 8193)}) < 50


def test_inputs_lie_where_they_were_and_hold_nobody_beside() -> None:
    like = {
        "goes": np.array([True]),
        "table": np.array([[3, 4, 5]], np.int32),
        "slots": np.array([9]),
    }
    nobody = {"goes": 0, "table": 7, "slots": 70}
    inputs = GraphBuffers(like, 3, {"table": 4}, nobody, torch.device("cpu"))
    places = {name: x.data_ptr() for name, x in inputs.tensors.items()}
    assert all(place % 16 == 0 for place in places.values())
    inputs.load({name: x.repeat(2, 0) for name, x in like.items()})
    inputs.load(like)
    assert inputs.tensors["goes"].tolist() == [True, False, False]
    assert inputs.tensors["table"].tolist() == [[3, 4, 5, 7], [7] * 4, [7] * 4]
    assert inputs.tensors["slots"].tolist() == [9, 70, 70]
    assert places == {name: x.data_ptr() for name, x in inputs.tensors.items()}
    inputs.load({})
    assert inputs.tensors["table"].unique().tolist() == [7]

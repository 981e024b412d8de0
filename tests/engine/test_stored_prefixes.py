"""Starts of prompts on disk: a later engine reads them and gives what computing gives."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole import LLM
from keyhole.cache.prefix_cache import prefix_digests
from keyhole.engine.engine import Engine
from keyhole.engine.prompts import prefix_store
from keyhole.engine.prompts.prefix_store import PrefixStore
from keyhole.engine.sequence import Sequence as Request
from keyhole.errors import CapacityError, ConfigError
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from tests.checkpoints import KINDS, make_model
from tests.engine.documents.pacing import Units, paced
from tests.policies.models import prompt, with_head
from tests.policies.recording import PAGE, forced, forced_logits, make_engine, run

CHUNK = 2 * PAGE
PROMPT, GIVEN = prompt(31), prompt(5)
#: Whole chunks below the prompt's last token.
STORED = 24
FULL = make_policy(None)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "_CHUNK", CHUNK)


@pytest.fixture(scope="module", params=sorted(KINDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make_model(request.param, tmp_path_factory.mktemp("model")), "cpu", "float32")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return with_head(make_model("llama", tmp_path_factory.mktemp("llama")))


def engine(model: Model, folder: Path, policy: Policy = FULL, **more: Any) -> Engine:
    return make_engine(model, policy, prefill_chunk=12, prefix_cache=folder, **more)


def asked(engine: Engine, text: list[int] = PROMPT) -> Request:
    request = forced(engine, text, GIVEN)
    run(engine)
    engine.known_prompts.flush()
    return request


def run_steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()
        engine.check_integrity()


def _never(*_: object) -> None:
    raise AssertionError("the disk is read")


def close(request: Request, wanted: torch.Tensor) -> None:
    found = torch.stack(request.logits)
    assert (found - wanted).abs().max() <= 1e-4 * max(1.0, wanted.abs().max().item())


@pytest.mark.slow
def test_a_start_survives_a_restart_in_every_family(model: Model, tmp_path: Path) -> None:
    wanted = forced_logits(model, FULL, PROMPT, GIVEN)
    first = asked(engine(model, tmp_path))
    assert first.num_cached == 0
    close(first, wanted)
    again = asked(engine(model, tmp_path))
    assert again.num_cached == STORED
    close(again, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", keyhole.available_policies())
def test_every_policy_continues_as_after_computing(llama: Model, tmp_path: Path, name: str) -> None:
    small = {"token_budget": 16, "prompt_in_budget": True}
    fields = make_policy(name).__dataclass_fields__
    policy = make_policy(name, {key: small[key] for key in small if key in fields})
    wanted = forced_logits(llama, policy, PROMPT, GIVEN)
    close(asked(engine(llama, tmp_path, policy)), wanted)
    again = asked(engine(llama, tmp_path, policy))
    # Queries of tokens that are not computed are not there.
    assert again.num_cached == (0 if policy.reads_queries else STORED)
    close(again, wanted)


def test_other_prompts_read_what_they_share_and_go_on(llama: Model, tmp_path: Path) -> None:
    asked(engine(llama, tmp_path))
    other = PROMPT[: CHUNK + 3] + prompt(9)
    later = engine(llama, tmp_path)
    request = asked(later, other)
    assert request.num_cached == CHUNK
    close(request, forced_logits(llama, FULL, other, GIVEN))
    # What memory knows comes first; then the disk.
    longer = asked(later, PROMPT)
    assert longer.num_cached == STORED
    close(longer, forced_logits(llama, FULL, PROMPT, GIVEN))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "other",
    [
        {"kv_dtype": "int8"},
        {"page_size": 2 * PAGE},
        {"prefill_policy": "xattention:block_size=8,stride=4,min_length=0,mass=0.5"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_an_engine_of_another_kind_reads_its_own_alone(
    llama: Model, tmp_path: Path, other: dict[str, Any]
) -> None:
    asked(engine(llama, tmp_path))
    assert asked(engine(llama, tmp_path, **other)).num_cached == 0
    assert asked(engine(llama, tmp_path, **other)).num_cached > 0
    assert asked(engine(llama, tmp_path)).num_cached == STORED


def test_other_weights_and_other_heads_are_others(tmp_path: Path, llama: Model) -> None:
    """An adapter is merged into the weights."""
    one = load(make_model("llama", tmp_path / "one"), "cpu", "float32")
    store = tmp_path / "store"
    asked(engine(one, store))
    with torch.no_grad():
        one.network.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    assert asked(engine(one, store)).num_cached == 0
    spe = make_policy("spe_context", {"token_budget": 16})
    asked(engine(llama, store))
    assert asked(engine(llama, store, spe)).num_cached == 0


def test_a_damaged_chunk_is_computed_again_with_a_warning(
    llama: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked(engine(llama, tmp_path))
    _, second, _ = prefix_digests(PROMPT, CHUNK)
    (file,) = (tmp_path / "prefixes").glob(f"{second.hex()}*")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING, "keyhole"):
        request = asked(engine(llama, tmp_path))
    assert "cannot be used" in caplog.text
    assert request.num_cached == CHUNK
    close(request, forced_logits(llama, FULL, PROMPT, GIVEN))
    assert asked(engine(llama, tmp_path)).num_cached == STORED  # it was written again


def test_offloaded_layers_read_starts(llama: Model, tmp_path: Path) -> None:
    quest, text = make_policy("quest", {"token_budget": 16}), prompt(70)
    wanted = forced_logits(llama, quest, text, GIVEN)
    plain = engine(llama, tmp_path / "store", quest)
    asked(plain, text)
    memory = {"memory": 16 * plain.cache.page_bytes, "offload": tmp_path}
    request = asked(engine(llama, tmp_path / "store", quest, max_batch=1, **memory), text)
    assert request.stats().offloaded_layers
    assert request.num_cached == 64
    close(request, wanted)


def test_scheduling_reads_nothing_and_others_decode_while_a_prefix_is_read(
    llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(engine(llama, tmp_path))
    later = engine(llama, tmp_path)
    paced(later, Units(1, 4))
    other = forced(later, prompt(3, 5), prompt(9, 6))
    run_steps(later, 2)
    before = other.num_computed
    request = forced(later, PROMPT, GIVEN)
    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "read", _never)
        plan = later.scheduler.schedule()
    assert plan.filling is request
    assert [sequence for sequence, _ in plan.chunks] == []
    later.abort(request)
    request = forced(later, PROMPT, GIVEN)
    known = []
    while request.num_computed < STORED:
        later.step()
        known.append(request.num_computed)
        assert len(known) < 9
    # Nothing runs before the first chunk is announced; then one chunk a step.
    assert known == [0, CHUNK, 2 * CHUNK, STORED]
    assert other.num_computed == before + len(known)
    run(later)
    assert request.num_cached == STORED
    close(request, forced_logits(llama, FULL, PROMPT, GIVEN))


@pytest.mark.parametrize("reason", ["abort", "pre-emption"])
def test_a_request_may_leave_while_its_prefix_is_read(
    llama: Model, tmp_path: Path, reason: str
) -> None:
    asked(engine(llama, tmp_path))
    later = engine(llama, tmp_path)
    paced(later, Units(1, 4))
    request = forced(later, PROMPT, GIVEN)
    run_steps(later, 3)
    assert 0 < request.num_computed < STORED
    if reason == "abort":
        later.abort(request)
        request = forced(later, PROMPT, GIVEN)
    else:
        later.scheduler.running.remove(request)
        later.scheduler._leave(request)
        request.num_computed = 0
        later.scheduler.waiting.appendleft(request)
    later.check_integrity()
    assert request.loading is None
    run(later)
    later.check_integrity()
    assert request.first == STORED
    close(request, forced_logits(llama, FULL, PROMPT, GIVEN))


def test_a_prefix_that_does_not_fit_in_memory_says_what_helps(
    llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(engine(llama, tmp_path))
    later = engine(llama, tmp_path)
    request = forced(later, PROMPT, GIVEN)

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "read", fails)
        with pytest.raises(CapacityError, match="did not fit in memory"):
            run(later)
    later.abort(request)
    later.check_integrity()
    close(asked(later), forced_logits(llama, FULL, PROMPT, GIVEN))


def test_settings_that_do_not_go_together_are_refused(llama: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the prefix cache, but prefix_cache is False"):
        LLM(llama, prefix_cache=False, prefix_store=tmp_path)
    with pytest.raises(
        ConfigError, match=r"prefix_store .* must be left out, because prefix_cache"
    ):
        LLM(llama, prefix_cache=tmp_path, prefix_store=tmp_path / "other")
    with pytest.raises(ConfigError, match="cannot be used with draft 'eagle3'"):
        LLM(llama, prefix_cache=tmp_path, draft="eagle3")
    with pytest.raises(ConfigError, match="prefix_store_bytes"):
        LLM(llama, prefix_cache=tmp_path, prefix_store_bytes="many")
    with pytest.raises(ConfigError, match="limits prefix_store, which is not given"):
        LLM(llama, prefix_store_bytes="1GiB")

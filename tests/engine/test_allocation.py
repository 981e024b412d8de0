"""Layers move down while texts grow: the same tokens and logits, within the memory given."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole import (
    LLM,
    CapacityError,
    ConfigError,
    Delta,
    InfLLM,
    OmniKV,
    Quest,
    SpeContext,
    StreamingLLM,
    TidalDecode,
)
from keyhole.engine.engine import Engine
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from tests.checkpoints import make_model
from tests.policies.models import prompt, with_head
from tests.policies.recording import GREEDY, PAGE, run, steps

MIXED = ["sliding_attention", "full_attention"] * 3
KINDS: dict[str, dict[str, Any]] = {
    "llama_group3": {},
    "llama_mha": {},
    "llama_mqa": {},
    "deepseek_v3": {},
    "gemma3": {"layer_types": MIXED},
}
POLICIES: list[Policy] = [
    SpeContext(token_budget=16, window_size=4),
    SpeContext(token_budget=17, window_size=4, refresh_every=3),
    Delta(token_budget=16, full_layers=(0,), delta_layers=(1, 3)),
    Quest(token_budget=16, full_layers=(1,)),
    StreamingLLM(token_budget=18),
    TidalDecode(token_budget=17, full_layers=(0,), selection_layers=(1, 3)),
    OmniKV(token_budget=17, full_layers=(0,), filter_layers=(1, 3)),
    InfLLM(token_budget=20),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder: Path = tmp_path_factory.mktemp("models")
    deep = {"num_hidden_layers": 6, "vocab_size": 64, "max_position_embeddings": 1024}
    return {
        kind: with_head(make_model(kind, folder, **deep, **more)) for kind, more in KINDS.items()
    }


def engine_of(model: Model, policy: Policy, **settings: Any) -> Engine:
    return LLM(model, policy, page_size=PAGE, max_batch=2, prefill_chunk=64, **settings).engine


def memory_for(model: Model, policy: Policy, folder: Path, pages: int, below: int) -> int:
    """The least memory that holds this many pages with this many layers offloaded."""
    plan = engine_of(model, policy, memory="1GiB", offload=folder).offloader
    assert plan is not None
    return plan.plan.model.cache_bytes(pages, below)


def buffer_bytes(engine: Engine) -> int:
    assert engine.offloader is not None
    buffers = engine.offloader.prefetcher._buffers.values()
    return sum(b.keys.untyped_storage().nbytes() + b.entries.nbytes for b in buffers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda p: f"{p.name}-{getattr(p, 'refresh_every', 1)}"
)
@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_change_when_layers_move(
    models: dict[str, Model], kind: str, policy: Policy, tmp_path: Path
) -> None:
    """Several thresholds are crossed in one generation, two ragged requests side by side."""
    model = models[kind]
    texts = [prompt(35), prompt(90)]
    params = dataclasses.replace(GREEDY, max_tokens=100)
    plain = engine_of(model, policy)
    wanted = [plain.add(text, params, keep_logits=True) for text in texts]
    run(plain)
    pages = sum(-(-len(request.tokens) // PAGE) for request in wanted) + 2
    movable = policy.resolve(plain.geometry).offloadable(plain.geometry)
    memory = memory_for(model, policy, tmp_path, pages, min(4, len(movable) - 1))
    engine = engine_of(model, policy, memory=memory, offload=tmp_path)
    assert engine.offloader is not None
    found = [engine.add(text, params, keep_logits=True) for text in texts]
    seen, ended, last = set(), set(), {}
    for _ in steps(engine):
        seen.add(engine.offloader.offloaded)
        # A request's number is that of its last step; when the first ends, layers may come up.
        last |= dict.fromkeys({0, 1} - ended, engine.offloader.offloaded)
        ended |= {i for i, r in enumerate(found) if r.is_finished}
        measured = engine.cache.resident_bytes + buffer_bytes(engine)
        assert measured <= memory
        model_of = engine.offloader.plan.model
        where = engine.cache.capacity, engine.offloader.offloaded
        lists = model_of.terms(*where)["lists"]  # are no tensors
        # The plan is to be within 5 % of what is there.
        assert measured == pytest.approx(model_of.cache_bytes(*where) - lists, rel=0.05)
    if (
        kind != "deepseek_v3" or policy.name != "spe_context"
    ):  # its buffers are eight times as large
        assert len(seen) >= min(5, len(movable))
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.tokens == other.tokens
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
        stats = one.stats()
        assert stats.offloaded_layers == last[i]
        assert stats.moved_bytes is not None
    assert other.stats().offloaded_layers is None
    assert other.stats().moved_bytes is None


@pytest.mark.slow
def test_requests_that_come_and_go_are_not_mixed_up(
    models: dict[str, Model], tmp_path: Path
) -> None:
    """Rows of the buffers are used again by others, pre-empted ones come back."""
    model, policy = models["llama_group3"], POLICIES[2]
    params = dataclasses.replace(GREEDY, max_tokens=40)
    texts = [prompt(n, seed) for seed, n in enumerate((90, 40, 70, 110, 60))]
    plain = engine_of(model, policy)
    wanted = [plain.add(text, params) for text in texts]
    run(plain)
    memory = memory_for(model, policy, tmp_path, 60, 3)
    engine = engine_of(model, policy, memory=memory, offload=tmp_path, prefix_cache=False)
    found = [engine.add(text, params) for text in texts]
    waited = 0
    for _ in steps(engine):
        waited += any(request.generated for request in engine.scheduler.waiting)
    assert waited
    assert [request.tokens for request in found] == [request.tokens for request in wanted]


def test_what_reads_everything_cannot_be_offloaded(
    models: dict[str, Model], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="'full' reads all keys"):
        engine_of(
            models["llama_mha"], LLM(models["llama_mha"]).policy, memory="1MiB", offload=tmp_path
        )
    with pytest.raises(ConfigError, match="offload needs memory="):
        engine_of(models["llama_mha"], POLICIES[0], offload=tmp_path)
    with pytest.raises(ConfigError, match="nowhere"):
        engine_of(models["llama_mha"], POLICIES[0], memory="1MiB", offload=tmp_path / "nowhere")


def test_a_dense_request_that_does_not_fit_is_told_of_offloading(
    models: dict[str, Model], tmp_path: Path
) -> None:
    """The same memory holds the request once layers may move."""
    model, policy = models["llama_mha"], POLICIES[2]
    params = dataclasses.replace(GREEDY, max_tokens=140)
    memory = memory_for(model, policy, tmp_path, 45, 3)
    dense = LLM(model, memory=memory, page_size=PAGE).engine
    with pytest.raises(CapacityError, match="offload="):
        dense.add(prompt(40), params)
    engine = engine_of(model, policy, memory=memory, offload=tmp_path)
    request = engine.add(prompt(40), params)
    run(engine)
    assert request.finish_reason == "length"
    assert len(request.generated) == 140
    with pytest.raises(CapacityError, match="offloaded that may be"):
        engine.add(prompt(40), dataclasses.replace(params, max_tokens=900))

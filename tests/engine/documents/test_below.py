"""Stored documents where layers are offloaded: answers are the same, holes stay away."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole import LLM, Delta, Quest, SpeContext
from keyhole.cache.resident_buffer import ResidentBuffer
from keyhole.engine.documents.prompt import assemble
from keyhole.engine.sequence import Sequence
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from keyhole.reuse import make_reuse
from tests.checkpoints import make_model
from tests.engine.documents.pacing import AtOnce, paced
from tests.policies.models import prompt, with_head
from tests.policies.recording import GREEDY, PAGE

BLOCK = 8
TEXTS = {name: prompt(length) for name, length in {"a": 91, "b": 20, "c": 130}.items()}
JOBS = [("sam_kv", ["c", "a", "b"]), ("reuse", ["a", "b"]), ("cacheblend", ["a", "c"])]
POLICIES: list[Policy] = [
    Delta(token_budget=16, full_layers=(0,), delta_layers=(1, 5)),
    Quest(token_budget=16, full_layers=(1,)),
    SpeContext(token_budget=16, window_size=4),
    SpeContext(token_budget=17, window_size=4, refresh_every=3),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    deep = {"num_hidden_layers": 8, "vocab_size": 64, "max_position_embeddings": 1024}
    mixed = {"layer_types": ["sliding_attention", "full_attention"] * 4}
    kinds: dict[str, dict[str, Any]] = {"llama": {}, "deepseek_v3": {}, "gemma3": mixed}
    return {
        kind: with_head(make_model(kind, folder, **deep, **more)) for kind, more in kinds.items()
    }


def answers(llm: LLM, jobs: list[tuple[str, list[str]]], new_tokens: int) -> list[Sequence]:
    """Several questions at once, with the logits of every token."""
    for name, ids in TEXTS.items():
        llm.documents.add(name, {"prompt_token_ids": ids}, block_size=BLOCK)
    params = dataclasses.replace(GREEDY, max_tokens=new_tokens)
    with ExitStack() as stack:
        found = []
        for number, (name, names) in enumerate(jobs):
            method = make_reuse(name, {"block_size": BLOCK} if name == "sam_kv" else {})
            method = method.resolve(llm.engine.geometry)
            question = {"prompt_token_ids": prompt(9, number)}
            asked = assemble(llm.engine, llm.documents, names, question, method, stack)
            add = llm.engine.add
            found.append(add(asked.tokens, params, context=asked.context, keep_logits=True))
        while llm.engine.has_work:
            llm.engine.step()
            llm.engine.check_integrity()
    for request in found:
        if request.error is not None:
            raise request.error
    return found


def opened(model: Model, policy: Policy, **settings: Any) -> LLM:
    """Documents are stored once per model, beside its weights.

    They are filled at once, so that the same requests run together in every engine.
    """
    assert model.head is not None
    llm = LLM(
        model,
        policy,
        page_size=PAGE,
        max_batch=2,
        prefill_chunk=64,
        documents=model.head.parent / "store",
        **settings,
    )
    paced(llm.engine, AtOnce())
    return llm


def below(model: Model, policy: Policy, place: Path, pages: int = 74) -> LLM:
    """With so little memory that four layers, if as many may, have to move."""
    offloader = opened(model, policy, memory="1GiB", offload=place).engine.offloader
    assert offloader is not None
    movable = len(offloader.plan.model.order)
    memory = offloader.plan.model.cache_bytes(pages, min(4, movable - 1))
    return opened(model, policy, memory=memory, offload=place)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("kind", "policy"),
    [("llama", policy) for policy in POLICIES]
    + [("deepseek_v3", POLICIES[2]), ("gemma3", POLICIES[0])],
    ids=lambda p: getattr(p, "name", p),
)
@pytest.mark.parametrize("stays", [True, False])
def test_answers_do_not_change_when_layers_move(
    models: dict[str, Model], kind: str, policy: Policy, stays: bool, tmp_path: Path
) -> None:
    """Layers move while documents come in; two questions side by side, a third after them.

    They come up between the steps of documents with holes, or stay below once they are there.
    """
    # Layers with a window need no pages of their own for documents, and one of the jobs is short
    # once its tokens are packed.
    pages = 60 if kind == "gemma3" or policy.name == "spe_context" else 74
    llm, plain = below(models[kind], policy, tmp_path, pages), opened(models[kind], policy)
    assert llm.engine.offloader is not None
    if stays:
        llm.engine.offloader.least = len(llm.engine.offloader.plan.model.order)
    wanted, found = (
        answers(one, JOBS[:2], 12) + answers(one, JOBS[2:], 12) for one in (plain, llm)
    )
    assert llm.engine.offloader.offloaded or not stays
    for one, other in zip(found, wanted, strict=True):
        assert one.generated == other.generated
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
        assert one.stats().moved_bytes or not stays
    assert any(one.stats().moved_bytes for one in found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", POLICIES[:3], ids=lambda p: p.name)
def test_what_a_layer_dropped_is_never_loaded(
    models: dict[str, Model], policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each layer loads once a step: what was begun ahead is what attention asks for."""
    llm = below(models["llama"], policy, tmp_path, 46)
    engine = llm.engine
    assert engine.offloader is not None
    # All layers fit, as the kept tokens are packed.
    engine.offloader.least = len(engine.offloader.plan.model.order)
    engine.offloader.offload_layer(engine.offloader.least)
    listed: list[tuple[int, torch.Tensor]] = []
    plain = ResidentBuffer.load_missing

    def watched(buffer: ResidentBuffer, selection: Any, *others: Any) -> Any:
        buffers = engine.offloader.prefetcher._buffers
        layer = next(i for i, known in buffers.items() if known is buffer)
        listed.append((layer, selection.indices))
        return plain(buffer, selection, *others)

    monkeypatch.setattr(ResidentBuffer, "load_missing", watched)
    step = engine.step
    kept, seen = None, 0

    def checked() -> list[Sequence]:
        nonlocal kept, seen
        listed.clear()
        found = step()
        running = engine.scheduler.running
        kept = running[0].kept if running else kept
        layers = [layer for layer, _ in listed]
        assert len(set(layers)) == len(layers)
        for layer, indices in listed:
            assert kept is not None
            early = indices[(indices >= 0) & (indices < kept.shape[1])].long()
            assert kept[layer, early].all()
            seen += len(early)
        return found

    monkeypatch.setattr(engine, "step", checked)
    answers(llm, JOBS[:1], 12)
    assert kept is not None
    assert not kept.all()
    assert seen

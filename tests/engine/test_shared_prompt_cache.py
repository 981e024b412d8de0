"""Prompts that one engine computed serve engines under other policies, and change nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.cache.pages import PageCache
from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache, write_pages
from keyhole.engine.sequence import Sequence
from keyhole.errors import ConfigError
from keyhole.models.model import Model
from keyhole.policies import available_policies, make_policy
from keyhole.policies.base import Policy
from keyhole.retrieval.head import RetrievalHead
from tests.checkpoints import make_model
from tests.policies.models import VOCAB, prompt, with_head

PAGE, COUNT = 4, 6
#: The last has no full page; the one before it ends with one, whose last token is computed again.
PROMPTS = (prompt(41), prompt(90, 1), prompt(32, 2), prompt(3, 3))
FULL_PAGES = (40, 88, 28, 0)
DEEP = {"num_hidden_layers": 4, "vocab_size": VOCAB, "max_position_embeddings": 512}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS = {"llama_group3": DEEP, "deepseek_v3": DEEP, "gemma3": DEEP | MIXED}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: with_head(make_model(kind, folder, **fields)) for kind, fields in KINDS.items()}


def make(name: str) -> Policy:
    """With a small budget, where it has one."""
    names = {field.name for field in dataclasses.fields(available_policies()[name])}
    return make_policy(name, {"token_budget": 16} if "token_budget" in names else {})


def serve(
    model: Model, name: str, copies: SharedPromptCache | None, **config: object
) -> list[Sequence]:
    """All prompts, three at a time, with a question in decode steps and logits kept."""
    settings = {"page_size": PAGE, "max_batch": 3, "prefill_chunk": 64, "prefix_cache": False}
    engine = Engine(model, make(name), EngineConfig(**(settings | config)), copies=copies)
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    served = [engine.add(p, params, given=prompt(3, 9), keep_logits=True) for p in PROMPTS]
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    return served


def logits(served: list[Sequence]) -> list[Tensor]:
    return [torch.stack(sequence.logits) for sequence in served]


def cached(served: list[Sequence]) -> tuple[int, ...]:
    return tuple(sequence.num_cached for sequence in served)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", available_policies())
def test_logits_are_those_of_an_engine_that_computes_its_prompts(
    models: dict[str, Model], kind: str, name: str
) -> None:
    model, copies, policy = models[kind], SharedPromptCache(2**30), make(name)
    assert cached(serve(model, "full", copies)) == (0, 0, 0, 0)
    expected = serve(model, name, None)
    for again in (False, True) if policy.wants_head else (False,):
        found = serve(model, name, copies)
        # Queries are not copied. A retrieval head's keys are there from the second time on.
        computes = policy.reads_queries or (policy.wants_head and not again)
        assert cached(found) == ((0,) * 4 if computes else FULL_PAGES)
        for one, other in zip(logits(found), logits(expected), strict=True):
            assert one.shape == other.shape
            assert (one - other).abs().max() <= 1e-4 * max(1.0, other.abs().max().item())


def test_another_head_makes_its_own_keys(models: dict[str, Model]) -> None:
    model, copies = models["llama_group3"], SharedPromptCache(2**30)
    serve(model, "spe_context", copies)
    head = RetrievalHead.from_pretrained(model.head, model.network)
    with torch.no_grad():
        for weight in head.parameters():
            weight.mul_(1.5)
    config = EngineConfig(page_size=PAGE, prefix_cache=False)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for expected in (0, FULL_PAGES[0]):
        engine = Engine(model, make("spe_context"), config, head=head, copies=copies)
        request = engine.add(PROMPTS[0], params)
        while engine.has_work:
            engine.step()
        assert request.num_cached == expected


def test_no_more_is_kept_than_the_limit(models: dict[str, Model]) -> None:
    model, copies = models["llama_group3"], SharedPromptCache(2**30)
    serve(model, "full", copies)
    layout = model.geometry(PAGE)
    assert copies.used == layout.token_bytes * sum(FULL_PAGES)
    assert len(copies) == 3
    tight = SharedPromptCache(layout.token_bytes * (FULL_PAGES[0] + FULL_PAGES[2]))
    serve(model, "full", tight)
    assert len(tight) == 2
    assert tight.used == tight.limit
    assert cached(serve(model, "quest", tight)) == (FULL_PAGES[0], 0, FULL_PAGES[2], 0)


@pytest.mark.slow
def test_pages_of_another_size_are_others(models: dict[str, Model]) -> None:
    model, copies = models["llama_group3"], SharedPromptCache(2**30)
    serve(model, "full", copies)
    assert cached(serve(model, "full", copies, page_size=8)) == (0, 0, 0, 0)
    assert cached(serve(model, "full", copies, page_size=8)) == (40, 88, 24, 0)


def test_a_new_purpose_forgets(models: dict[str, Model]) -> None:
    copies = SharedPromptCache(2**30)
    copies.begin("a")
    serve(models["llama_group3"], "full", copies)
    copies.begin("a")
    assert len(copies) == 3
    copies.begin("b")
    assert (len(copies), copies.used) == (0, 0)


@pytest.mark.slow
def test_pushed_out_and_let_in_again(models: dict[str, Model]) -> None:
    """Few pages: somebody gives his back, and takes the copy the next time, too."""
    model, copies = models["llama_group3"], SharedPromptCache(2**30)
    expected = logits(serve(model, "quest", copies))
    probe = Engine(model, make("quest"), EngineConfig(page_size=PAGE, max_batch=3))
    found = serve(model, "quest", copies, memory=36 * probe.cache.page_bytes)
    assert cached(found) == FULL_PAGES
    for one, other in zip(logits(found), expected, strict=True):
        assert (one - other).abs().max() <= 1e-4


def test_refused_where_layers_move_down(models: dict[str, Model], tmp_path: Path) -> None:
    config = EngineConfig(page_size=PAGE, memory=2**20, offload=str(tmp_path))
    with pytest.raises(ConfigError, match="offload"):
        Engine(models["llama_group3"], make("delta"), config, copies=SharedPromptCache(2**20))


def test_each_layer_is_summarised_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages were numbered on the first layer's device for all of them."""
    layouts = (LayerLayout(num_kv_heads=1, key_dim=4, value_dim=4),) * 3
    geometry = Geometry(layers=layouts, num_query_heads=1, page_size=PAGE, itemsize=4)
    policy, places = make("quest"), [torch.device(name) for name in ("cpu", "meta", "cpu")]
    cache = PageCache(
        geometry,
        4,
        dtype=torch.float32,
        device=places[0],
        page_data=[policy.page_data(layout, PAGE) for layout in layouts],
        layer_devices=places,
    )
    pages = cache.allocate(2)
    assert pages is not None
    seen: list[torch.device] = []

    def on_append(own: Policy, keys: Tensor, data: object, pages: Tensor, filled: Tensor) -> None:
        assert pages.device == filled.device == keys.device
        assert filled.tolist() == [PAGE] * 2 if keys.device.type == "cpu" else filled.is_meta
        seen.append(keys.device)

    monkeypatch.setattr(type(policy), "on_append", on_append)
    write_pages(cache, pages, cache.content(pages), {}, policy)
    assert seen == places

"""Layers come back when texts have ended: the same results, no bytes loaded for nothing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole import LLM, Delta, Policy, Quest, SamplingParams, SpeContext, TidalDecode
from keyhole.cache import huge_pages
from keyhole.cache.tiers import PinnedTier
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.errors import CapacityError
from keyhole.models.model import Model
from keyhole.planner import LayerMemory, MemoryModel, MemoryPlan
from tests.checkpoints import make_model
from tests.engine.test_allocation import buffer_bytes
from tests.policies.models import prompt, with_head
from tests.policies.recording import GREEDY, PAGE, steps

QUEST = Quest(token_budget=16, full_layers=(1,))
POLICIES: list[Policy] = [
    QUEST,
    SpeContext(token_budget=16, window_size=4),
    SpeContext(token_budget=17, window_size=4, refresh_every=3),
    Delta(token_budget=16, full_layers=(0,), delta_layers=(1, 5)),
    TidalDecode(token_budget=17, full_layers=(0,), selection_layers=(1, 5)),
]
MIXED = ["sliding_attention", "full_attention"] * 4
KINDS: dict[str, dict[str, Any]] = {
    "llama_group3": {},
    "deepseek_v3": {},
    "gemma3": {"layer_types": MIXED},
}
#: When a request comes, its prompt, and how many tokens it wants. A long text with short ones
#: beside it, which share the start of their prompts; short ones alone; once more a long one.
COMING = (
    (0, prompt(150), 40),
    (2, prompt(40, 1), 60),
    (3, prompt(40, 1) + prompt(9, 2), 60),
    (50, prompt(40, 1) + prompt(30, 3), 20),
    (66, prompt(190, 4), 40),
    (70, prompt(20, 5), 60),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    deep = {"num_hidden_layers": 8, "vocab_size": 64, "max_position_embeddings": 1024}
    return {
        kind: with_head(make_model(kind, folder, **deep, **more)) for kind, more in KINDS.items()
    }


@pytest.fixture(scope="module")
def model(models: dict[str, Model]) -> Model:
    return models["llama_group3"]


def engine_of(model: Model, policy: Policy = QUEST, **settings: Any) -> Engine:
    settings = {"page_size": PAGE, "max_batch": 4, "prefill_chunk": 256, **settings}
    return LLM(model, policy, **settings).engine


def small(
    model: Model, folder: Path, policy: Policy = QUEST, *, pages: int = 95, **settings: Any
) -> Engine:
    """With memory for this many pages when four layers (or all that can be) are offloaded."""
    roomy = engine_of(model, policy, memory="1GiB", offload=folder, **settings)
    assert roomy.offloader is not None
    plan = roomy.offloader.plan
    memory = plan.model.cache_bytes(pages, min(4, len(plan.model.order) - 1))
    return engine_of(model, policy, memory=memory, offload=folder, **settings)


def below(engine: Engine) -> int:
    assert engine.offloader is not None
    return engine.offloader.offloaded


def serve(
    engine: Engine,
    coming: tuple[tuple[int, list[int], int], ...] = COMING,
    after: Callable[[], None] = lambda: None,
) -> tuple[list[Sequence], list[int]]:
    """The requests, and the number of offloaded layers after each step."""
    requests, seen, number, left = [], [], 0, list(coming)
    while left or engine.has_work:
        for when, text, count in list(left):
            if when <= number:
                params = dataclasses.replace(GREEDY, max_tokens=count)
                requests.append(engine.add(text, params, keep_logits=True))
                left.remove((when, text, count))
        engine.step()
        engine.check_integrity()
        after()
        seen.append(0 if engine.offloader is None else engine.offloader.offloaded)
        number += 1
    return requests, seen


@pytest.fixture(scope="module")
def wanted(model: Model) -> list[Sequence]:
    """What comes of all requests where every layer stays."""
    return serve(engine_of(model))[0]


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    ("kind", "policy"),
    [("llama_group3", policy) for policy in POLICIES]
    + [("deepseek_v3", QUEST), ("gemma3", POLICIES[1]), ("gemma3", QUEST)],
    ids=lambda p: p if isinstance(p, str) else f"{p.name}-{getattr(p, 'refresh_every', 1)}",
)
def test_results_do_not_change_when_layers_come_back(
    models: dict[str, Model], kind: str, policy: Policy, prefix_cache: bool, tmp_path: Path
) -> None:
    """Bit by bit, with requests in the middle of their texts, over pages that they share."""
    if kind == "gemma3" and policy is QUEST:
        policy = Quest(token_budget=16, full_layers=())
    wanted, _ = serve(engine_of(models[kind], policy, prefix_cache=prefix_cache))
    engine = small(models[kind], tmp_path, policy, prefix_cache=prefix_cache)
    found, seen = serve(engine)
    pairs = list(itertools.pairwise(seen))
    assert any(now < before for before, now in pairs)
    assert any(now > before for before, now in pairs[seen.index(max(seen)) :])
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        assert one.num_cached == other.num_cached
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
    assert any(request.num_cached for request in found) == prefix_cache


def test_a_short_request_after_a_long_one_loads_nothing(tmp_path: Path) -> None:
    """One long request left layers of the bundled model below for every later one."""
    policy = SpeContext(token_budget=64)
    llm = LLM(keyhole.tiny(), policy, max_batch=2, memory="1MiB", offload=tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    def ask(length: int, seed: int) -> Any:
        return llm.generate({"prompt_token_ids": prompt(length, seed)}, params).stats

    long = ask(600, 0)
    assert long.offloaded_layers == below(llm.engine) > 2
    assert long.moved_bytes > 0
    for seed in (1, 2, 3):
        later = ask(120, seed)
        assert later.offloaded_layers == later.moved_bytes == 0
    again = ask(600, 4)
    assert again.offloaded_layers == long.offloaded_layers


@pytest.mark.slow
def test_a_long_answer_goes_on_above_when_its_neighbour_ends(model: Model, tmp_path: Path) -> None:
    engine = small(model, tmp_path, pages=60)
    long = engine.add(prompt(150), dataclasses.replace(GREEDY, max_tokens=10))
    short = engine.add(prompt(30, 1), dataclasses.replace(GREEDY, max_tokens=60))
    seen = [(long.is_finished, below(engine), short.counters.moved_bytes) for _ in steps(engine)]
    first = next(i for i, (ended, _, _) in enumerate(seen) if ended)
    assert seen[first][1] > 0
    assert {count for _, count, _ in seen[first + 1 :]} == {0}
    assert seen[-1][2] == seen[first][2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
def test_memory_is_kept_to_at_every_moment(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """After each step, and at each tensor that is made: then one is there twice, and no more."""
    if not in_place:
        monkeypatch.setattr(huge_pages, "is_lazy", lambda _: False)
    engine = small(model, tmp_path)
    assert engine.offloader is not None
    memory = engine.offloader.plan.cache_memory
    real = huge_pages.new_empty

    def held() -> int:
        return engine.cache.resident_bytes + buffer_bytes(engine)

    def new_empty(like: torch.Tensor, *shape: int, most: int = 0) -> torch.Tensor:
        tensor = real(like, *shape, most=most)
        assert held() <= memory
        assert held() + tensor.nbytes <= memory + max(x.nbytes for x in engine.cache._tensors())
        return tensor

    def check() -> None:
        assert held() <= memory
        pages, layers = engine.cache.capacity, below(engine)
        assert engine.offloader is not None
        assert held() <= engine.offloader.plan.model.cache_bytes(pages, layers) <= memory

    monkeypatch.setattr(huge_pages, "new_empty", new_empty)
    _, seen = serve(engine, after=check)
    assert max(seen) > seen[-1]


@pytest.mark.slow
def test_no_layer_goes_down_for_prompts_that_nobody_reads(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many different prompts fill what is free above, and the oldest go before a layer does."""
    engine = small(model, tmp_path, pages=46)
    assert engine.offloader is not None
    most = engine.offloader.plan.capacities[0]

    def refused(*_: object) -> None:
        raise AssertionError("a layer goes down")

    monkeypatch.setattr(engine.offloader.prefetcher, "offload", refused)
    params = dataclasses.replace(GREEDY, max_tokens=2)
    for text in [prompt(48, seed) for seed in range(12)] * 2:
        engine.add(text, params)
        for _ in steps(engine):
            pass
    assert engine.prefix is not None
    assert most - 13 <= len(engine.prefix.held()) <= most < 12 * 12


def test_a_whole_known_prompt_is_copied_without_moving_a_layer(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last page is written again, into a copy, for which another known prompt goes."""
    engine = small(model, tmp_path, pages=46)
    assert engine.offloader is not None
    most = engine.offloader.plan.capacities[0]
    params = dataclasses.replace(GREEDY, max_tokens=1)
    for seed, length in enumerate((most // 2 * PAGE, (most - most // 2) * PAGE)):
        engine.add(prompt(length, seed), params)
        for _ in steps(engine):
            pass
    assert engine.prefix is not None
    assert engine.cache.at_hand == 0
    moved = []
    offload = engine.offloader.prefetcher.offload
    monkeypatch.setattr(
        engine.offloader.prefetcher, "offload", lambda *a: (moved.append(a), offload(*a))
    )
    again = engine.add(prompt((most - most // 2) * PAGE, 1), params)
    for _ in steps(engine):
        pass
    assert again.num_cached == (most - most // 2) * PAGE - 1
    assert not moved


def test_a_conversation_keeps_what_it_reads(model: Model, tmp_path: Path) -> None:
    """The next turn of a long conversation reuses its pages, with as many layers offloaded."""
    engine = small(model, tmp_path, pages=46)
    first = engine.add(prompt(150), dataclasses.replace(GREEDY, max_tokens=2))
    for _ in steps(engine):
        pass
    layers = below(engine)
    turn = engine.add(prompt(150) + prompt(7, 1), dataclasses.replace(GREEDY, max_tokens=2))
    for _ in steps(engine):
        assert below(engine) >= layers
    assert turn.num_cached == 150 // PAGE * PAGE
    assert first.stats().offloaded_layers == layers > 0


def test_of_a_known_prompt_that_is_given_up_the_start_stays(model: Model, tmp_path: Path) -> None:
    engine = small(model, tmp_path, pages=46)
    assert engine.offloader is not None
    params = dataclasses.replace(GREEDY, max_tokens=2)
    for text in (prompt(150), prompt(9, 1)):
        engine.add(text, params)
        for _ in steps(engine):
            pass
    assert below(engine) == 0
    again = engine.add(prompt(150), params)
    for _ in steps(engine):
        pass
    most = engine.offloader.plan.capacities[0]
    assert (most - 4) * PAGE <= again.num_cached <= most * PAGE < 150


def test_pages_reserved_beside_the_cache_leave_known_prompts_so_much_less(
    model: Model, tmp_path: Path
) -> None:
    """When layers become resident, known prompts give up what was reserved, and no page more."""
    engine, reserved = small(model, tmp_path, pages=46), 3
    assert engine.offloader is not None
    assert engine.prefix is not None
    assert engine.cache.reserve(reserved)
    for text in (prompt(150), prompt(9, 1)):
        engine.add(text, dataclasses.replace(GREEDY, max_tokens=2))
        for _ in steps(engine):
            pass
    most = engine.offloader.plan.capacities[0]
    assert below(engine) == 0
    assert engine.cache.capacity + reserved <= most
    assert most - reserved - 2 <= engine.cache.in_use <= most - reserved


@pytest.mark.slow
def test_nothing_comes_up_while_a_request_waits_for_pages(model: Model, tmp_path: Path) -> None:
    engine = small(model, tmp_path, pages=60, prefix_cache=False)
    half, most = engine.max_pages // 2 * PAGE, (engine.max_pages - 5) * PAGE
    first = engine.add(prompt(8), dataclasses.replace(GREEDY, max_tokens=4))
    long = engine.add(prompt(half), dataclasses.replace(GREEDY, max_tokens=60))
    wide = engine.add(prompt(most, 1), dataclasses.replace(GREEDY, max_tokens=4))
    layers = 0
    for _ in steps(engine):
        if wide.slot < 0 and not wide.is_finished:
            assert below(engine) >= layers
            layers = below(engine)
    assert first.is_finished
    assert long.is_finished
    assert wide.is_finished
    assert layers > 0


def test_a_text_of_which_every_page_stays_known_is_gone_all_the_same(
    model: Model, tmp_path: Path
) -> None:
    """No page became free at its end, and nobody looked whether layers could come up."""
    engine = small(model, tmp_path, pages=46)
    for length, count in ((149, 4), (9, 4)):
        engine.add(prompt(length), dataclasses.replace(GREEDY, max_tokens=count))
        for _ in steps(engine):
            pass
        if length == 149:
            assert engine.prefix is not None
            assert len(engine.prefix.held()) == engine.cache.in_use == (149 + 3) // PAGE
            assert below(engine) > 0
    assert below(engine) == 0


def test_a_page_that_somebody_else_holds_stays_where_it_is(model: Model, tmp_path: Path) -> None:
    engine = small(model, tmp_path, pages=46)
    engine.add(prompt(150), dataclasses.replace(GREEDY, max_tokens=4))
    while engine.has_work:
        engine.step()
    pages = engine.cache.allocate(1)
    assert pages is not None
    params = dataclasses.replace(GREEDY, max_tokens=4)
    engine.add(prompt(9, 1), params)
    while engine.has_work:
        engine.step()
    assert below(engine) > 0
    engine.cache.release(pages)
    engine.add(prompt(9, 2), params)
    for _ in steps(engine):
        pass
    assert below(engine) == 0


@pytest.mark.slow
def test_memory_that_somebody_else_has_taken_leaves_layers_below(
    model: Model, wanted: list[Sequence], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests continue: an offloaded layer is slower, not wrong."""
    engine = small(model, tmp_path)
    make_resident = engine.cache.make_resident
    refused = []

    def full(layer: int) -> None:
        refused.append(layer)
        if len(refused) % 2:
            raise CapacityError("no memory")
        make_resident(layer)

    monkeypatch.setattr(engine.cache, "make_resident", full)
    found, _ = serve(engine)
    assert len(refused) > 2
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


@pytest.mark.slow
def test_layers_that_are_to_stay_below_stay(model: Model, tmp_path: Path) -> None:
    engine = small(model, tmp_path)
    assert engine.offloader is not None
    engine.offloader.offload_layer(2)
    engine.offloader.least = 2
    _, seen = serve(engine)
    assert min(seen) == 2 < max(seen)
    assert seen[-1] < max(seen)


@pytest.mark.slow
def test_pinned_memory_goes_the_same_way(
    model: Model, wanted: list[Sequence], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier below a GPU, here below a CPU."""
    monkeypatch.setattr("keyhole.engine.allocation.make_tier", lambda *_: PinnedTier())
    found, seen = serve(small(model, tmp_path))
    assert max(seen) > seen[-1]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


# The rule.

LAYER = LayerMemory(token_bytes=10, slot_bytes=12)


def plan_of(memory: int, layers: int = 5) -> MemoryPlan:
    model = MemoryModel(
        layers=(LAYER,) * layers,
        requests=2,
        token_budget=8,
        buffer_tokens=12,
        weight_bytes=100,
        page_size=4,
        list_page_bytes=8,
    )
    return MemoryPlan(model=model, memory=memory)


def test_a_layer_comes_back_when_what_may_come_fits_beside_it() -> None:
    """Computed by hand: a page takes 208 bytes with five resident layers.

    Each offloaded layer takes 40 bytes less, and 288 bytes of buffers. Without the weights, 9,900
    bytes hold 47 pages, then 57, 72, 102, 182, 1,057.
    """
    plan = plan_of(10_000)
    assert plan.capacities == (47, 57, 72, 102, 182, 1057)
    # All of the growth fits: 40 + 7 = 47.
    assert plan.still_offloaded(40, 7, 5) == 0
    # It does not, but an eighth of the room, 5 pages of 47 and 7 of 57, stays free.
    assert plan.still_offloaded(42, 1000, 5) == 0
    assert plan.still_offloaded(43, 1000, 5) == 1
    assert plan.still_offloaded(50, 1000, 5) == 1
    assert plan.still_offloaded(51, 1000, 5) == 2
    # Nothing more may come: up to the last page.
    assert plan.still_offloaded(47, 0, 5) == 0
    assert plan.still_offloaded(48, 0, 5) == 1
    # Nothing goes down here, and what is to stay stays.
    assert plan.still_offloaded(1000, 0, 3) == 3
    assert plan.still_offloaded(1, 0, 5, least=4) == 4


def test_between_coming_up_and_going_down_lie_many_steps() -> None:
    """Whatever growth is announced, as many pages must be filled as all of it, or an eighth."""
    plan = plan_of(10_000)
    for pages in range(1, 1000):
        for growth in (0, 1, 5, 30, 500):
            layers = plan.still_offloaded(pages, growth, 5)
            most = plan.capacities[layers]
            if layers < 5:
                assert most - pages >= min(growth, most // 8)
            assert layers == 5 or plan.offloaded_for(pages) is not None
            assert layers >= (plan.offloaded_for(pages) or 0)


@pytest.mark.slow
def test_a_text_at_the_threshold_moves_a_layer_once(model: Model, tmp_path: Path) -> None:
    """It outgrows the resident memory, and no layer becomes resident until a request has ended."""
    engine = small(model, tmp_path, pages=46)
    assert engine.offloader is not None
    room = engine.offloader.plan.capacities[0] * PAGE
    engine.add(prompt(room - 4), dataclasses.replace(GREEDY, max_tokens=30))
    moves = [engine.cache.moves for _ in steps(engine)]
    assert below(engine) > 0
    grown = sum(now > before for before, now in itertools.pairwise(moves))
    assert grown <= below(engine)

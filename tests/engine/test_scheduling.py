"""Batches that come and go, pages that run out, and replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from keyhole import (
    LLM,
    CapacityError,
    Delta,
    NumericalError,
    Policy,
    Quest,
    SamplingParams,
    StreamingLLM,
)
from keyhole.engine.engine import Engine
from keyhole.engine.scheduling.scheduler_output import PageCopies
from keyhole.engine.sequence import Sequence
from keyhole.models.model import Model

PARAMS = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
PROMPTS = [[5 + i] * (10 + 7 * i) for i in range(5)]
POLICIES = [
    None,
    Quest(token_budget=16),
    Delta(token_budget=16, delta_layers=(2,)),
    StreamingLLM(token_budget=16),
]


def engine(model: Model, policy: Policy | None, **settings: object) -> Engine:
    return LLM(model, policy, page_size=8, **settings).engine


def run(engine: Engine, params: SamplingParams = PARAMS) -> tuple[list[list[int]], int]:
    sequences = [engine.add(prompt, params) for prompt in PROMPTS]
    replays = 0
    schedule = engine.scheduler.schedule

    def counted() -> object:
        nonlocal replays
        plan = schedule()
        replays += len(plan.preempted)
        return plan

    engine.scheduler.schedule = counted  # type: ignore[method-assign, assignment]
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    return [sequence.generated for sequence in sequences], replays


@pytest.mark.one_in(9)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_running_out_of_pages_changes_nothing(
    model: Model, policy: Policy | None, prefix_cache: bool
) -> None:
    wanted, none = run(engine(model, policy, prefix_cache=prefix_cache))
    page_bytes = engine(model, policy).cache.page_bytes
    # Five requests end at 70 to 98 tokens, 9 to 13 pages each; only 20 pages for all.
    tight = engine(model, policy, prefix_cache=prefix_cache, memory=20 * page_bytes)
    found, some = run(tight)
    assert (none, some > 0) == (0, True)
    assert found == wanted


@pytest.mark.slow
def test_sampled_tokens_survive_replay(model: Model) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=4, ignore_eos=True)
    policy = Quest(token_budget=16)
    wanted, _ = run(engine(model, policy), params)
    page_bytes = engine(model, policy).cache.page_bytes
    found, some = run(engine(model, policy, memory=20 * page_bytes), params)
    assert some > 0
    assert found == wanted


def test_a_single_request_may_fill_the_whole_memory(model: Model) -> None:
    page_bytes = engine(model, None).cache.page_bytes
    full = engine(model, None, memory=9 * page_bytes)
    for _ in range(2):  # the second finds its whole prompt in the prefix cache
        sequence = full.add([7] * 16, SamplingParams(max_tokens=56, temperature=0, ignore_eos=True))
        while full.has_work:
            full.step()
        assert len(sequence.generated) == 56
        full.check_integrity()


@pytest.mark.slow
def test_sequences_never_exceed_the_batch(model: Model) -> None:
    small = engine(model, None, max_batch=2)
    for prompt in PROMPTS:
        small.add(prompt, PARAMS)
    while small.has_work:
        small.step()
        assert len(small.scheduler.running) <= 2


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nan_ends_only_the_request_that_has_it(
    model: Model, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    one = engine(model, None)
    good, bad = one.add([5] * 10, PARAMS), one.add([6] * 20, PARAMS)
    forward, calls = one.model.forward, []

    def broken(
        token_ids: torch.Tensor, positions: torch.Tensor, batch: object, rows: torch.Tensor
    ) -> torch.Tensor:
        logits = forward(token_ids, positions, batch, rows)  # type: ignore[arg-type]
        calls.append(len(logits))
        if len(calls) == 5:
            logits[0, 4] = float("-inf")  # a token that is ruled out
            logits[1, 3] = wrong
        return logits

    monkeypatch.setattr(one.model, "forward", broken)
    while one.has_work:
        one.step()
    assert isinstance(bad.error, NumericalError)
    assert (bad.finish_reason, good.finish_reason, len(good.generated)) == ("error", "length", 60)
    one.check_integrity()


TORCH_IS_OUT = RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("when", ["forward", "growth"])
@pytest.mark.parametrize("error", [TORCH_IS_OUT, MemoryError("std::bad_alloc")])
def test_running_out_of_memory_says_what_helps_and_loses_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch, when: str, error: Exception
) -> None:
    wanted = LLM(model, page_size=8).generate({"prompt_token_ids": PROMPTS[0]}, PARAMS).token_ids
    llm = LLM(model, page_size=8)

    def fails(*_: object) -> torch.Tensor:
        raise error

    if when == "forward":
        monkeypatch.setattr(llm.engine.model, "forward", fails)
    else:
        monkeypatch.setattr("keyhole.cache.huge_pages.enlarged", fails)
    with pytest.raises(CapacityError, match="memory=") as caught:
        llm.generate([{"prompt_token_ids": [4 + i] * 300} for i in range(3)], PARAMS)
    assert "MiB" in str(caught.value) or "prompt tokens" in str(caught.value)
    monkeypatch.undo()
    llm.engine.check_integrity()
    assert llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS).token_ids == wanted


def test_without_memory_to_grow_requests_take_turns(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 pages of 8 tokens have memory: for one long request, or for short ones until they grow."""
    prompts = [{"prompt_token_ids": [4 + i] * size} for i, size in enumerate([40, 80, 60, 300])]
    params = replace(PARAMS, max_tokens=100)
    wanted = [result.token_ids for result in LLM(model, page_size=8).generate(prompts, params)]
    llm = LLM(model, page_size=8, prefix_cache=False)
    llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS)

    def fails(*_: object) -> torch.Tensor:
        raise TORCH_IS_OUT

    monkeypatch.setattr("keyhole.cache.huge_pages.enlarged", fails)
    assert [result.token_ids for result in llm.generate(prompts, params)] == wanted
    assert llm.engine.cache.peak_pages <= llm.engine.cache.provided == 64
    llm.engine.check_integrity()


def test_a_request_without_memory_to_run_alone_ends_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyhole.cache.pages._FIRST_PAGES", 16)
    one = engine(model, None)
    first = one.add(PROMPTS[0], PARAMS)
    one.step()

    def fails(*_: object) -> torch.Tensor:
        raise TORCH_IS_OUT

    monkeypatch.setattr("keyhole.cache.huge_pages.enlarged", fails)
    large, grown, small = (one.add([7] * size, PARAMS) for size in (300, 120, 60))
    while one.has_work:
        one.step()
        one.check_integrity()
    assert isinstance(large.error, CapacityError)
    assert isinstance(grown.error, CapacityError)
    assert [len(request.generated) for request in (first, large, grown, small)] == [60, 0, 9, 60]


@pytest.mark.slow
def test_a_request_that_gave_way_does_not_count_its_own_prompt_as_cached(model: Model) -> None:
    """It finds the pages that it filled itself before; nothing of it was known when it came."""
    one, two = list(range(3, 53)), list(range(90, 40, -1))
    page = engine(model, None, memory="8MiB").cache.page_bytes
    small = engine(model, None, memory=20 * page)
    schedule, gave_way = small.scheduler.schedule, []

    def watched() -> object:
        plan = schedule()
        gave_way.extend(plan.preempted)
        return plan

    small.scheduler.schedule = watched  # type: ignore[assignment]
    requests = [small.add(prompt, PARAMS) for prompt in (one, two)]
    while small.has_work:
        small.step()
    assert gave_way
    assert [request.stats().cached_prompt_tokens for request in requests] == [0, 0]


@pytest.mark.parametrize("error", [TORCH_IS_OUT, KeyboardInterrupt()])
def test_what_was_to_be_copied_without_memory_for_it_is_computed(
    model: Model, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """It went on from pages that nothing had been copied into, and others stayed in use."""
    text, few = list(range(5, 21)), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    busy = engine(model, None)
    first = busy.add(text, PARAMS)
    while not first.generated:
        busy.step()
    again, other = busy.add(text, few), busy.add(text, few)

    def fails(source: list[int], target: list[int]) -> None:
        raise error

    wanted = CapacityError if error is TORCH_IS_OUT else KeyboardInterrupt
    match = "copies of cached pages did not fit" if error is TORCH_IS_OUT else None
    with monkeypatch.context() as patch:
        patch.setattr(busy.cache, "copy", fails)
        with pytest.raises(wanted, match=match):
            busy.step()
    assert [*busy.scheduler.waiting] == [again, other]
    while busy.has_work:
        busy.step()
        busy.check_integrity()
    assert again.generated == other.generated == first.generated[:6]


def test_an_error_of_one_admission_does_not_lose_the_pages_of_another(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached prompt continues in a copy of its last page, made before the model runs."""
    text, few = list(range(5, 21)), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    plain = engine(model, None)
    alone = plain.add(text, few)
    while plain.has_work:
        plain.step()
    busy = engine(model, None)
    first = busy.add(text, PARAMS)
    while not first.generated:
        busy.step()
    again, other = busy.add(text, few), busy.add(text[3:], few)
    admit = busy.scheduler.pages.reserve_all

    def fails(sequence: Sequence, copies: PageCopies, spare: int) -> bool:
        if sequence is other:
            raise CapacityError("no memory")
        return admit(sequence, copies, spare)

    with monkeypatch.context() as patch:
        patch.setattr(busy.scheduler.pages, "reserve_all", fails)
        busy.step()
        assert again.num_cached == len(text) - 1
        assert len(again.generated) == 1
        with pytest.raises(CapacityError, match="no memory"):
            busy.step()
    while busy.has_work:
        busy.step()
        busy.check_integrity()
    assert again.generated == alone.generated
    assert other.finish_reason == "length"

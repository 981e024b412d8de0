"""`policy=` of a call: a request gets what an engine of that policy gives it, or is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole import (
    LLM,
    AsyncLLM,
    CapacityError,
    ClusterKV,
    ConfigError,
    Delta,
    Full,
    InfLLM,
    Policy,
    Quest,
    RaaS,
    SamplingParams,
    ShadowKV,
    SpeContext,
    StreamingLLM,
)
from keyhole.engine import engine as core
from keyhole.engine.engine import Engine
from keyhole.engine.model_runner import Runner
from keyhole.engine.request import PolicySpec
from keyhole.engine.sequence import Sequence as Request
from keyhole.models.model import Model
from keyhole.registry import SettingsFile
from tests.engine.policy_calls import (
    BUDGET,
    COUNT,
    NEEDS_MORE,
    PARAMS,
    POLICIES,
    PROMPTS,
    SETTINGS,
    SPECS,
    Answers,
    add,
    alone,
    check,
    mixed,
    model,
    small,
)
from tests.policies.models import prompt
from tests.policies.recording import PAGE, make_engine, run

__all__ = ["alone", "model"]


@pytest.mark.slow
@pytest.mark.parametrize("own", POLICIES)
def test_every_policy_beside_every_other(model: Model, alone: Answers, own: str) -> None:
    """Each either gets what its own engine gives, beside the others, or is refused by name."""
    engine = make_engine(model, small(own), **SETTINGS)
    found: dict[Policy, list[Request]] = {small(own): [add(engine, one) for one in PROMPTS]}
    for name in POLICIES:
        if name in NEEDS_MORE - {own}:
            with pytest.raises(ConfigError, match=f"'{name}' .* with policy '{own}'.*start the"):
                engine.under(small(name))
            continue
        found[small(name)] = [add(engine, one, small(name)) for one in PROMPTS]
    run(engine)
    assert len(found) == len(POLICIES) - len(NEEDS_MORE - {own})
    for policy, requests in found.items():
        check(requests, alone(policy))


@pytest.mark.slow
def test_the_policies_of_these_tests_read_different_things(alone: Answers) -> None:
    longest = [alone(small(name))[-1][1:] for name in POLICIES]
    for one, other in itertools.combinations(longest, 2):
        assert not torch.allclose(one, other, atol=1e-5, rtol=1e-4)


#: Settings of the engine, and of requests beside it.
OTHER_SETTINGS = [
    (small("delta"), {"token_budget": 4 * PAGE}),
    (small("delta"), {"delta_layers": (1, 2)}),
    (small("delta"), {"token_budget": 2 * BUDGET}),
    (Quest(token_budget=BUDGET), {"token_budget": 4 * PAGE}),
    (Quest(token_budget=BUDGET), {"share_group": False}),
    (InfLLM(token_budget=BUDGET), {"token_budget": 6 * PAGE}),
    (ClusterKV(token_budget=BUDGET), {"token_budget": 5 * PAGE}),
    (ShadowKV(token_budget=BUDGET), {"token_budget": 6 * PAGE}),
    (SpeContext(token_budget=BUDGET), {"token_budget": 4 * PAGE}),
    (SpeContext(token_budget=BUDGET), {"refresh_every": 3}),
    (RaaS(token_budget=2 * PAGE), {"token_budget": PAGE}),
    (StreamingLLM(token_budget=BUDGET), {"token_budget": 4 * PAGE}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("own", "other"), OTHER_SETTINGS, ids=str)
def test_the_same_policy_with_other_settings(
    model: Model, alone: Answers, own: Policy, other: dict[str, Any]
) -> None:
    """Beside its own and full attention; an object and a dict of what differs mean the same."""
    wanted = dataclasses.replace(own, **other)
    engine = make_engine(model, own, **SETTINGS)
    assert (
        engine.under(other).policy == engine.under(wanted).policy == wanted.resolve(engine.geometry)
    )
    requests = {
        policy: [add(engine, one, spec) for one in PROMPTS]
        for policy, spec in ((own, None), (wanted, other), (Full(), "full"))
    }
    run(engine)
    for policy, answers in requests.items():
        check(answers, alone(policy))
    assert not torch.allclose(alone(own)[-1], alone(wanted)[-1], atol=1e-5, rtol=1e-4)


def test_names_with_settings_and_settings_files_are_policies_of_a_call(
    model: Model, tmp_path: Path
) -> None:
    engine = make_engine(model, Delta(token_budget=BUDGET))
    file = tmp_path / "measured.json"
    SettingsFile(policy="delta", settings={"token_budget": 16}).save(file)
    wanted = Delta(token_budget=16).resolve(engine.geometry)
    for spec in ("delta:token_budget=16", "DELTA:token_budget=16", file, str(file)):
        assert engine.under(spec).policy == wanted
    assert engine.under(Delta(token_budget=BUDGET)) is engine.under(None) is engine.under({})


def test_a_dict_changes_the_settings_as_they_were_given(model: Model) -> None:
    """Recent pages are an eighth of the request's budget, not of the engine's."""
    engine = make_engine(model, Delta(token_budget=64 * PAGE))
    assert engine.policy.recent_pages == 8
    assert engine.under({"token_budget": 16 * PAGE}).policy.recent_pages == 2


@pytest.mark.parametrize(
    ("own", "spec", "said"),
    [
        ("delta", "dleta", "did you mean 'delta'"),
        ("delta", {"token_budgt": 3}, "did you mean 'token_budget'"),
        ("full", {"token_budget": 64}, "unknown setting of policy full 'token_budget'"),
        ("delta", {"token_budget": 1}, "token_budget 1 must be at least one page"),
        ("delta", "quest", "'high' and 'low' with every page.*start the LLM with policy='quest'"),
        ("shadowkv", {"chunk_size": 2}, "of another shape.*policy='shadowkv' and these settings"),
        ("delta", "spe_context", "retrieval head, which was not loaded; start the LLM with"),
        ("delta", "seer_attention_r", "it needs a gate, which was not loaded; start the LLM with"),
        ("seer_attention_r", {"gate": "elsewhere"}, "the gate of 'the model'; omit gate"),
        ("spe_context", {"head": "elsewhere"}, "retrieval head of 'the model'; omit head"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_queued(
    model: Model, own: str, spec: PolicySpec, said: str
) -> None:
    llm = LLM(model, small(own), page_size=PAGE, memory="4MiB")
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    for call in (llm.generate, llm.stream, llm.submit):
        with pytest.raises(ConfigError, match=said) as error:
            call(PROMPTS[0], PARAMS, policy=spec)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=said):
        asyncio.run(AsyncLLM(llm).generate(PROMPTS[0], PARAMS, policy=spec))
    assert len(llm.engine.scheduler.running) == 1
    assert not llm.engine.scheduler.waiting
    assert len([*stream]) == COUNT - 1
    llm.engine.check_integrity()


def test_the_model_runs_once_for_each_policy_of_a_step(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, Delta(token_budget=BUDGET), max_batch=8)
    calls: list[int] = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda ids, *rest: (calls.append(len(ids)), forward(ids, *rest))[1]
    )
    for spec in (None, "full", None, "full", {"token_budget": 4 * PAGE}, None):
        add(engine, PROMPTS[0], spec)
    engine.step()  # the prompts
    calls.clear()
    engine.step()
    assert sorted(calls) == [1, 2, 3]
    run(engine)
    calls.clear()
    for _ in range(3):
        add(engine, PROMPTS[0])
    run(engine)
    assert len(calls) == COUNT


# Prefixes


def cached(engine: Engine, tokens: list[int], policy: PolicySpec | None, **more: Any) -> int:
    request = add(engine, tokens, policy, **more)
    run(engine)
    return request.num_cached


START = prompt(12 * PAGE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "first", "second", "shares"),
    [
        ("delta", "full", None, True),
        ("delta", None, "full", True),
        ("delta", "streaming_llm:token_budget=20", {"token_budget": 16}, True),
        ("quest", "full", None, True),  # the bounds of its pages are there
        ("quest", None, "full", True),
        ("quest", {"token_budget": 16}, None, True),
        ("clusterkv", "full", None, True),
        ("shadowkv", "full", None, True),
        ("spe_context", "full", None, True),  # and the head's keys
        ("raas", "full", None, True),
        ("infllm", "full", None, False),  # it would need the queries
        ("infllm", None, "full", False),
        ("infllm", {"token_budget": 24}, None, False),
        ("infllm", "full", "delta:token_budget=20", True),
    ],
)
def test_prefixes_are_shared_if_the_pages_hold_what_is_needed(
    model: Model,
    alone: Answers,
    own: str,
    first: PolicySpec | None,
    second: PolicySpec | None,
    shares: bool,
) -> None:
    engine = make_engine(model, small(own), **SETTINGS)
    add(engine, [*START, 5], first)
    run(engine)
    request = add(engine, [*START, 6, 7], second)
    policy = request.under.policy
    run(engine)
    assert request.num_cached == (len(START) if shares else 0)
    other = make_engine(model, policy, **SETTINGS)
    wanted = add(other, [*START, 6, 7])
    run(other)
    check([request], [torch.stack(wanted.logits)])


@pytest.mark.slow
def test_what_a_sparse_policy_generated_is_shared_with_that_policy_alone(model: Model) -> None:
    engine = make_engine(model, Delta(token_budget=BUDGET), **SETTINGS)
    first = add(engine, START, {"token_budget": 4 * PAGE})
    run(engine)
    again = [*first.tokens, 9]
    assert cached(engine, again, "full", reuse_approximate=True) == len(START)
    # Full attention has made them exact, for all.
    engine = make_engine(model, Delta(token_budget=BUDGET), **SETTINGS)
    first = add(engine, START, {"token_budget": 4 * PAGE})
    run(engine)
    same = {"token_budget": 4 * PAGE}
    assert cached(engine, again, None, reuse_approximate=False) == len(START)
    engine = make_engine(model, Delta(token_budget=BUDGET), **SETTINGS)
    first = add(engine, START, same)
    run(engine)
    assert cached(engine, again, None, reuse_approximate=True) == len(START)
    engine = make_engine(model, Delta(token_budget=BUDGET), **SETTINGS)
    first = add(engine, START, same)
    run(engine)
    full_pages = (len(first.tokens) - 1) // PAGE * PAGE
    assert cached(engine, again, same, reuse_approximate=True) == full_pages > len(START)


def test_what_full_attention_generated_is_exact_for_everybody(model: Model) -> None:
    engine = make_engine(model, Quest(token_budget=BUDGET), **SETTINGS)
    first = add(engine, START, "full")
    run(engine)
    full_pages = (len(first.tokens) - 1) // PAGE * PAGE
    assert cached(engine, [*first.tokens, 9], None) == full_pages > len(START)


# Batches that come and go


@pytest.mark.slow
def test_running_out_of_pages_changes_nothing(model: Model) -> None:
    """Replayed under the policy that a request had, prompts and generated tokens."""
    long = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    preempted = 0

    def generated(**settings: Any) -> list[list[int]]:
        nonlocal preempted
        engine = make_engine(model, Quest(token_budget=4 * PAGE), max_batch=8, **settings)
        requests = [
            engine.add(prompt(5 + 6 * i), long, under=engine.under(spec))
            for i, spec in enumerate(SPECS)
        ]
        schedule = engine.scheduler.schedule

        def counted() -> Any:
            nonlocal preempted
            plan = schedule()
            preempted += len(plan.preempted)
            return plan

        engine.scheduler.schedule = counted  # type: ignore[method-assign]
        while engine.has_work:
            engine.step()
            engine.check_integrity()
        return [request.generated for request in requests]

    wanted = generated()
    assert not preempted
    page = make_engine(model, Quest(token_budget=4 * PAGE)).cache.page_bytes
    assert generated(memory=50 * page) == wanted
    assert preempted


def test_a_policy_whose_part_of_a_step_fails_leaves_the_others_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = make_engine(model, Delta(token_budget=BUDGET), max_batch=8)
    expected = mixed(wanted, SPECS)
    run(wanted)
    engine = make_engine(model, Delta(token_budget=BUDGET), max_batch=8)
    found = mixed(engine, SPECS)
    for _ in range(3):
        engine.step()
    inner, fails = Runner.run, [True]

    def run_or_fail(self: Runner, plan: Any) -> Any:
        if fails and plan.decodes and plan.decodes[0].under.policy.name == "full":
            fails.clear()
            raise MemoryError
        return inner(self, plan)

    monkeypatch.setattr(Runner, "run", run_or_fail)
    with pytest.raises(CapacityError, match="2 decoding sequences"):
        engine.step()
    run(engine)
    for one, other in zip(found, expected, strict=True):
        assert one.generated == other.generated


def test_requests_that_leave_free_their_pages(model: Model) -> None:
    llm = LLM(model, Delta(token_budget=BUDGET), page_size=PAGE, memory="4MiB", prefix_cache=False)
    streams = [llm.stream(PROMPTS[1], PARAMS, policy=spec) for spec in SPECS]
    for stream in streams:
        next(stream)
    assert llm.engine.cache.in_use
    for stream in streams:
        stream.close()
    assert not llm.engine.cache.in_use
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_policies_that_nobody_uses_any_more_are_forgotten(model: Model) -> None:
    """A server's clients may name any number of budgets."""
    engine = make_engine(model, Delta(token_budget=BUDGET), max_batch=4)
    long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    lasting = engine.add(PROMPTS[0], long, under=engine.under("full"))
    short = SamplingParams(max_tokens=1, temperature=0.0)
    for pages in range(2, 22):
        under = engine.under({"token_budget": pages * PAGE})
        request = engine.add(PROMPTS[0], short, under=under)
        while not request.is_finished:
            engine.step()
    assert not lasting.is_finished
    assert lasting.under in engine._runners
    assert len(engine._runners) == 3 + core._MOST_IDLE
    run(engine)

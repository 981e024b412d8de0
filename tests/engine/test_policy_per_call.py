"""`policy=` of a call: a request gets what an engine of that policy gives it, or is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import keyhole
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
    SamKV,
    SamplingParams,
    ShadowKV,
    SpeContext,
    StreamingLLM,
)
from keyhole.engine import engine as core
from keyhole.engine.engine import Engine
from keyhole.engine.model_runner import Runner
from keyhole.engine.request_policy import PolicySpec
from keyhole.engine.sequence import Sequence as Request
from keyhole.errors import UnknownNameError
from keyhole.models.loading import Model
from keyhole.policies import make_policy
from keyhole.settings_file import SettingsFile
from tests.checkpoints import make_model
from tests.engine.run_again import RunAgain
from tests.policies.models import VOCAB, prompt, with_head
from tests.policies.recording import PAGE, make_engine, run

POLICIES = keyhole.available_policies()
BUDGET = 10 * PAGE
COUNT = 14
PARAMS = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
#: Within the budget and beyond it; longer than a chunk of a prompt; two begin alike.
PROMPTS = [prompt(3), prompt(61), prompt(61) + prompt(9, 1), prompt(90, 2)]
SETTINGS: dict[str, Any] = {"max_batch": 8, "prefill_chunk": 24}

#: What these keep beside the keys of a page, no other engine has; nor a retrieval head.
NEEDS_MORE = {"quest", "infllm", "clusterkv", "shadowkv", "spe_context"}


#: Layers of those that would read everything in so few layers; RaaS counts generated tokens alone.
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "delta": {"delta_layers": (1,)},
    "tidal_decode": {"selection_layers": (1,)},
    "omnikv": {"filter_layers": (1,)},
    "raas": {"token_budget": 2 * PAGE},
}


def small(name: str) -> Policy:
    has_budget = "token_budget" in POLICIES[name].__dataclass_fields__
    settings = {"token_budget": BUDGET} if has_budget else {}
    return make_policy(name, settings | OWN_SETTINGS.get(name, {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    fields = {"num_hidden_layers": 4, "vocab_size": VOCAB, "max_position_embeddings": 512}
    return with_head(make_model("llama_group3", tmp_path_factory.mktemp("model"), **fields))


Answers = Callable[[Policy], list[Tensor]]


@pytest.fixture(scope="module")
def alone(model: Model) -> Answers:
    """Logits of all prompts in an engine of one policy."""

    @functools.cache
    def answers(policy: Policy) -> list[Tensor]:
        engine = make_engine(model, policy, **SETTINGS)
        requests = [add(engine, tokens) for tokens in PROMPTS]
        run(engine)
        return [torch.stack(request.logits) for request in requests]

    return answers


def add(
    engine: Engine, tokens: list[int], policy: PolicySpec | None = None, **more: Any
) -> Request:
    return engine.add(tokens, PARAMS, keep_logits=True, under=engine.under(policy), **more)


def check(requests: Sequence[Request], wanted: Sequence[Tensor]) -> None:
    for request, logits in zip(requests, wanted, strict=True):
        torch.testing.assert_close(torch.stack(request.logits), logits, atol=1e-5, rtol=1e-4)
        assert len(request.generated) == COUNT


@pytest.mark.one_in(2)
@pytest.mark.parametrize("own", POLICIES)
def test_every_policy_beside_every_other(model: Model, alone: Answers, own: str) -> None:
    """Each either gets what its own engine gives, beside the others, or is refused by name."""
    engine = make_engine(model, small(own), **SETTINGS)
    found: dict[Policy, list[Request]] = {small(own): [add(engine, one) for one in PROMPTS]}
    for name in POLICIES:
        if name in NEEDS_MORE - {own}:
            with pytest.raises(ConfigError, match=f"'{name}' .* beside policy '{own}'.*start the"):
                engine.under(small(name))
            continue
        found[small(name)] = [add(engine, one, small(name)) for one in PROMPTS]
    run(engine)
    assert len(found) == len(POLICIES) - len(NEEDS_MORE - {own})
    for policy, requests in found.items():
        check(requests, alone(policy))


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


@pytest.mark.one_in(2)
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
        ("spe_context", {"head": "elsewhere"}, "retrieval head of 'the model'; leave head out"),
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


def mixed(engine: Engine, specs: Sequence[PolicySpec | None]) -> list[Request]:
    return [add(engine, PROMPTS[i % len(PROMPTS)], spec) for i, spec in enumerate(specs)]


SPECS: list[PolicySpec | None] = [
    None,
    "full",
    {"token_budget": 4 * PAGE},
    "streaming_llm:token_budget=20",
    "raas:token_budget=8",
    None,
    "full",
]


def test_running_out_of_pages_changes_nothing(model: Model) -> None:
    """Replayed under the policy that a request had, prompts and generated tokens."""
    long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
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
    assert generated(memory=60 * page) == wanted
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


# Threads, tasks, chats, documents


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("llm")
    fields = {"num_hidden_layers": 4, "vocab_size": 300}
    path = make_model("llama", folder, tokenizer=True, **fields)
    return LLM(
        path,
        Quest(token_budget=32),
        page_size=8,
        memory="8MiB",
        max_batch=6,
        documents=folder / "documents",
    )


def test_calls_of_many_threads_under_many_policies(model: Model) -> None:
    llm = LLM(model, Delta(token_budget=BUDGET), page_size=PAGE, memory="4MiB", max_batch=4)
    work = [(PROMPTS[i % 3], SPECS[i % len(SPECS)]) for i in range(21)]
    wanted = [llm.generate(one, PARAMS, policy=spec).token_ids for one, spec in work]
    assert len({tuple(tokens) for tokens in wanted}) > 3

    def call(i: int) -> list[int]:
        one, spec = work[i]
        if i % 2:
            pieces = llm.stream(one, PARAMS, policy=spec)
            return [token for piece in pieces for token in piece.token_ids]
        return llm.generate([one, one], PARAMS, policy=spec)[1].token_ids

    with ThreadPoolExecutor(7) as pool:
        assert list(pool.map(call, range(len(work)))) == wanted
    llm.engine.check_integrity()
    assert not llm.engine.has_work


def test_tasks_under_many_policies(model: Model) -> None:
    llm = LLM(model, Delta(token_budget=BUDGET), page_size=PAGE, memory="4MiB", max_batch=4)
    wanted = [llm.generate(PROMPTS[1], PARAMS, policy=spec).token_ids for spec in SPECS]
    served = AsyncLLM(llm)

    async def main() -> list[Any]:
        refused = served.generate(PROMPTS[0], PARAMS, policy="quest")
        calls = [served.generate(PROMPTS[1], PARAMS, policy=spec) for spec in SPECS]
        return await asyncio.gather(refused, *calls, return_exceptions=True)

    refused, *found = asyncio.run(main())
    assert isinstance(refused, ConfigError)
    assert "'quest'" in str(refused)
    assert [result.token_ids for result in found] == wanted


def test_chats_and_several_completions_take_a_policy(llm: LLM) -> None:
    messages = [{"role": "user", "content": "a text that is longer than the budget " * 4}]
    params = SamplingParams(n=2, max_tokens=6, temperature=0.0, ignore_eos=True)
    dense = LLM(llm.engine.model, page_size=8, memory="4MiB")
    wanted = dense.chat(messages, params)
    found = llm.chat(messages, params, policy="full")
    assert [one.token_ids for one in found.completions] == [
        one.token_ids for one in wanted.completions
    ]
    assert found.stats.attended_fraction == 1.0
    assert llm.chat(messages, params).stats.attended_fraction < 1.0
    single = dataclasses.replace(params, n=1)
    *_, last = llm.stream_chat(messages, single, policy="full")
    assert last.result.token_ids == wanted.token_ids

    async def chat() -> Any:
        return await AsyncLLM(llm).chat(messages, single, policy="full")

    assert asyncio.run(chat()).token_ids == wanted.token_ids


def test_questions_over_documents_take_a_policy(llm: LLM) -> None:
    llm.documents.add("one", "the first text of all, long enough for a budget", block_size=16)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    reuse = SamKV(block_size=16)
    dense = LLM(llm.engine.model, page_size=8, memory="4MiB", documents=llm._store[0])
    wanted = dense.ask("a question?", ["one"], reuse=reuse, params=params)
    found = llm.ask("a question?", ["one"], reuse=reuse, params=params, policy="full")
    assert found.token_ids == wanted.token_ids
    *_, last = llm.stream_ask("a question?", ["one"], reuse=reuse, params=params, policy="full")
    assert last.result.token_ids == wanted.token_ids
    with pytest.raises(UnknownNameError, match="did you mean 'full'"):
        llm.ask("a question?", ["one"], params=params, policy="ful")
    llm.engine.check_integrity()


def test_documents_are_refused_under_a_policy_that_needs_their_queries(
    tmp_path: Path, model: Model
) -> None:
    llm = LLM(model, InfLLM(token_budget=BUDGET), page_size=PAGE, memory="4MiB", documents=tmp_path)
    llm.documents.add("one", {"prompt_token_ids": prompt(30)}, block_size=16)
    asked = functools.partial(
        llm.ask, {"prompt_token_ids": prompt(3)}, ["one"], reuse=SamKV(block_size=16), params=PARAMS
    )
    with pytest.raises(ConfigError, match="'infllm' needs the queries"):
        asked()
    assert len(asked(policy="full").token_ids) == COUNT


# Offloading, recorded steps


def test_beside_offloaded_layers_runs_what_reads_them_through_the_buffers(
    tmp_path: Path, model: Model
) -> None:
    own = Delta(token_budget=16, delta_layers=(1,))
    engine = make_engine(model, own, offload=tmp_path, memory="96KiB", max_batch=2)
    plain = make_engine(model, own, max_batch=2)
    specs = [None, {"token_budget": 2 * PAGE}, "streaming_llm:token_budget=12", None]
    found, wanted = (
        [add(each, prompt(120, i), spec) for i, spec in enumerate(specs)]
        for each in (engine, plain)
    )
    below = 0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        below = max(below, engine.placement.offloaded if engine.placement else 0)
    run(plain)
    assert below
    for one, other in zip(found, wanted, strict=True):
        assert one.generated == other.generated
    for spec, said in (
        ("full", "policy 'full' .* 'delta' .* reads all keys of layers 2, 3.*leave offload= out"),
        ("raas", "reads all keys"),
        ({"token_budget": 32}, "token_budget 32 must be at most 16.*offloaded layers"),
    ):
        with pytest.raises(ConfigError, match=said):
            engine.under(spec)


def test_each_policy_repeats_steps_of_its_own(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders: list[RunAgain] = []

    def make_recorder(_: torch.device) -> RunAgain:
        recorders.append(RunAgain())
        if len(recorders) > 1:
            recorders[-1].cache = recorders[0].cache
        return recorders[-1]

    plain = make_engine(model, Quest(token_budget=BUDGET), max_batch=8)
    monkeypatch.setattr(core, "make_recorder", make_recorder)
    engine = make_engine(model, Quest(token_budget=BUDGET), max_batch=8)
    recorders[0].cache = engine.cache
    found, wanted = mixed(engine, SPECS), mixed(plain, SPECS)
    run(engine)
    run(plain)
    assert len(recorders) == len({request.under for request in found}) == 5
    assert all(recorder.repeated for recorder in recorders)
    assert engine.replayed_steps == sum(recorder.repeated for recorder in recorders)
    for one, other in zip(found, wanted, strict=True):
        check([one], [torch.stack(other.logits)])

"""`policy=` of a call from threads, tasks, chats and documents, and beside offloaded layers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole import (
    LLM,
    AsyncLLM,
    ConfigError,
    Delta,
    InfLLM,
    Quest,
    SamKV,
    SamplingParams,
)
from keyhole.engine import engine as core
from keyhole.errors import UnknownNameError
from keyhole.models.model import Model
from tests.checkpoints import make_model
from tests.engine.policy_calls import (
    BUDGET,
    COUNT,
    PARAMS,
    PROMPTS,
    SPECS,
    add,
    check,
    mixed,
    model,
)
from tests.engine.run_again import RunAgain
from tests.policies.models import prompt
from tests.policies.recording import PAGE, make_engine, run

__all__ = ["model"]


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


@pytest.mark.slow
def test_calls_of_many_threads_under_many_policies(model: Model) -> None:
    llm = LLM(model, Delta(token_budget=BUDGET), page_size=PAGE, memory="4MiB", max_batch=4)
    work = [(PROMPTS[i % 3], SPECS[i % len(SPECS)]) for i in range(14)]
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


@pytest.mark.slow
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
        below = max(below, engine.offloader.offloaded if engine.offloader else 0)
    run(plain)
    assert below
    for one, other in zip(found, wanted, strict=True):
        assert one.generated == other.generated
    for spec, said in (
        ("full", "policy 'full' .* 'delta' .* reads all keys of layers 2, 3.*omit offload="),
        ("raas", "reads all keys"),
        ({"token_budget": 32}, "token_budget 32 must be at most 16.*offloaded layers"),
    ):
        with pytest.raises(ConfigError, match=said):
            engine.under(spec)


@pytest.mark.slow
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

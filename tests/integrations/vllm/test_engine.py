"""One engine of vLLM on the CPU, in this process, under every policy.

Run by `make test-vllm`, in a separate environment.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`")

import vllm

from keyhole.integrations.vllm.backend import attach, model_layers
from keyhole.integrations.vllm.settings import PluginSettings
from keyhole.policies import make_policy
from tests.integrations.vllm.engines import (
    LAYERS,
    MAX_LENGTH,
    PAGE_SIZE,
    POLICIES,
    answers,
    make_checkpoint,
    own_tokens,
    paged,
    policy_name,
    random_prompts,
    start,
)

pytestmark = pytest.mark.filterwarnings("default")  # of vLLM and what it brings along


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def alone(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The answer of vLLM without Keyhole, in a separate process."""
    path = tmp_path_factory.mktemp("alone") / "answers.json"
    command = [sys.executable, "-m", "tests.integrations.vllm.engines", checkpoint, str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return list(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def engine(checkpoint: str) -> vllm.LLM:
    return start(checkpoint, additional_config={"keyhole": {"policy": "full"}})


@pytest.fixture
def under(engine: vllm.LLM) -> Iterator[Callable[..., vllm.LLM]]:
    """The same engine under another policy: an engine takes half a minute to start."""

    def use(name: str, **settings: Any) -> vllm.LLM:
        asked = PluginSettings(policy=policy_name(name), settings=settings)

        def replace(worker: Any) -> None:
            for layer in model_layers(worker.vllm_config).values():
                layer.impl.adapter = layer.impl.layer_number = None
            attach(worker.vllm_config, asked, torch.device("cpu"), PAGE_SIZE)

        engine.collective_rpc(replace)
        # Pages that were cached before have no data of this policy.
        assert engine.reset_prefix_cache()
        return engine

    yield use
    assert scheduler(engine).kv_cache_manager.block_pool.get_num_free_blocks() == 63, "leaked"


def scheduler(engine: vllm.LLM) -> Any:
    return engine.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


def test_vllm_alone_is_what_transformers_computes(alone: list[Any], checkpoint: str) -> None:
    assert [tokens for tokens, _ in alone] == own_tokens(checkpoint, make_policy("full"))


@pytest.mark.parametrize("name", ["full", *POLICIES])
def test_a_budget_that_covers_the_length_gives_vllms_own_tokens_and_log_probabilities(
    name: str, under: Callable[..., vllm.LLM], alone: list[Any]
) -> None:
    settings = {} if name == "full" else {"token_budget": MAX_LENGTH, **POLICIES[name]}
    got = answers(under(name, **settings))
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in alone]
    for (_, mine), (_, theirs) in zip(got, alone, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-4, rtol=0)


@pytest.mark.parametrize("budget", [PAGE_SIZE * 2, PAGE_SIZE * 4])
@pytest.mark.parametrize("name", POLICIES)
def test_under_a_budget_the_tokens_are_those_of_keyholes_engine(
    name: str, budget: int, under: Callable[..., vllm.LLM], alone: list[Any], checkpoint: str
) -> None:
    """Ragged lengths, prompts in chunks beside requests that decode, all in one batch."""
    settings = {"token_budget": budget, **POLICIES[name]}
    got = [tokens for tokens, _ in answers(under(name, **settings))]
    assert got == own_tokens(checkpoint, paged(name, **settings))
    assert got != [tokens for tokens, _ in alone], "nothing was skipped"


@pytest.mark.parametrize("name", ["quest", "delta"])
def test_a_cached_prefix_keeps_its_data(
    name: str, under: Callable[..., vllm.LLM], checkpoint: str
) -> None:
    settings = {"token_budget": PAGE_SIZE * 3, **POLICIES[name]}
    prefix, *ends = random_prompts(200, 20, 45, 70, seed=1)
    prompts = [prefix + end for end in ends]
    llm = under(name, **settings)
    first = [tokens for tokens, _ in answers(llm, prompts[:1])]
    others = [tokens for tokens, _ in answers(llm, prompts)]
    assert first + others[1:] == own_tokens(checkpoint, paged(name, **settings), prompts)
    assert others[:1] == first
    outputs = llm.generate([{"prompt_token_ids": prompts[1]}], use_tqdm=False)
    assert outputs[0].num_cached_tokens is not None
    assert outputs[0].num_cached_tokens >= 192


@pytest.mark.parametrize("name", ["quest", "delta"])
def test_preempted_requests_end_as_they_would_alone(
    name: str, under: Callable[..., vllm.LLM], monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    llm = under(name, token_budget=MAX_LENGTH, **POLICIES[name])
    preempted: list[str] = []
    plain = scheduler(llm)._preempt_request

    def count(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        plain(request, *args, **kwargs)

    monkeypatch.setattr(scheduler(llm), "_preempt_request", count)
    prompts = random_prompts(*[230] * 8, seed=2)  # 8 pages each, 10 at the end, of 63
    got = [tokens for tokens, _ in answers(llm, prompts, 70)]
    assert preempted
    assert got == own_tokens(checkpoint, make_policy("full"), prompts, 70)


def test_no_block_is_leaked_by_2000_requests_with_random_aborts(
    under: Callable[..., vllm.LLM],
) -> None:
    llm = under("quest", token_budget=PAGE_SIZE * 2)
    core, choose = llm.llm_engine, random.Random(0)
    waiting = [f"request-{i}" for i in range(2000)]
    running: set[str] = set()
    ended = aborted = 0
    prefix = random_prompts(64, seed=3)[0]
    while waiting or running:
        while waiting and len(running) < 12:
            name = waiting.pop()
            prompt = (
                prefix * choose.randint(0, 2)
                + random_prompts(choose.randint(1, 90), seed=choose.randint(0, 99))[0]
            )
            params = vllm.SamplingParams(
                max_tokens=choose.randint(1, 12), temperature=0.0, ignore_eos=True
            )
            core.add_request(name, {"prompt_token_ids": prompt}, params)
            running.add(name)
        for output in core.step():
            if output.finished:
                running.discard(output.request_id)
                ended += 1
        if running and choose.random() < 0.2:
            victim = choose.choice(sorted(running))
            core.abort_request([victim])
            running.discard(victim)
            aborted += 1
    assert ended + aborted == 2000
    assert aborted > 100


def test_the_counters_say_what_was_read(under: Callable[..., vllm.LLM]) -> None:
    llm = under("streaming_llm", token_budget=PAGE_SIZE * 2, sink_size=0)
    answers(llm, random_prompts(300), 11)  # the first token is the prompt's

    def counters(worker: Any) -> Any:
        return model_layers(worker.vllm_config)[0].impl.adapter.counters.values

    (counts,) = llm.collective_rpc(counters)
    lengths = range(301, 311)
    # The newest page is partly filled; the one before it is whole.
    read = sum(PAGE_SIZE + (n - 1) % PAGE_SIZE + 1 for n in lengths)
    assert counts.rows == 10
    assert counts.keys_there == LAYERS * sum(lengths)
    assert counts.keys_read == LAYERS * read
    assert counts.pages_chosen == LAYERS * 10 * 2
    assert counts.sparse_layers == LAYERS

"""`AsyncLLM`: tasks that wait for one engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from keyhole import (
    LLM,
    AsyncLLM,
    CapacityError,
    ConfigError,
    PromptTooLongError,
    RequestError,
    SamplingParams,
)
from keyhole.engine.sequence import Piece, Sequence
from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import make_model

ROOT = Path(__file__).parents[2]
TASKS = 200
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3 + (7 * n + i) % 50 for i in range(3 + n % 9)]} for n in range(9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make_model("llama", tmp_path_factory.mktemp("model"), vocab_size=64), "cpu")


@pytest.fixture
def llm(model: Model) -> LLM:
    return LLM(model, memory="8MiB", max_batch=16)


def at_rest(llm: LLM) -> None:
    """Nothing runs, and no page is held but by the prefix cache."""
    with llm.engine.lock:
        assert not llm.engine.has_work
        llm.engine.check_integrity()


async def rest(served: AsyncLLM) -> None:
    while not served._steps.is_idle:
        await asyncio.sleep(0.001)


def test_a_name_is_no_llm() -> None:
    """`AsyncLLM("tiny")` was taken, and its first request never came back."""
    with pytest.raises(ConfigError, match=r"AsyncLLM\(LLM\('tiny'\)\), not 'tiny'"):
        AsyncLLM("tiny")  # type: ignore[arg-type]


@pytest.mark.parametrize("interval", ["x", None, -1, float("nan"), True])
def test_an_interval_is_a_number_of_seconds(llm: LLM, interval: Any) -> None:
    """With a text, the thread of the steps failed, and requests waited for ever."""
    with pytest.raises(ConfigError, match=rf"stream_interval {interval!r} must be"):
        AsyncLLM(llm, stream_interval=interval)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [0.0, 0.02])
def test_many_tasks_get_what_each_gets_alone(llm: LLM, interval: float) -> None:
    alone = [llm.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]
    served = AsyncLLM(llm, stream_interval=interval)

    async def one(n: int) -> list[int]:
        prompt = PROMPTS[n % len(PROMPTS)]
        if n % 2:
            return (await served.generate(prompt, PARAMS)).token_ids
        return [t async for piece in served.stream(prompt, PARAMS) for t in piece.token_ids]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*map(one, range(TASKS)))

    found = asyncio.run(main())
    assert found == [alone[n % len(PROMPTS)] for n in range(TASKS)]
    at_rest(llm)


def test_a_list_gives_a_list(llm: LLM) -> None:
    wanted = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
    found = asyncio.run(AsyncLLM(llm).generate(PROMPTS, PARAMS))
    assert [result.token_ids for result in found] == wanted


@pytest.mark.slow
def test_a_cancelled_task_frees_its_request(llm: LLM) -> None:
    served = AsyncLLM(llm)

    async def main() -> None:
        tasks = [asyncio.create_task(served.generate(PROMPTS[n], LONG)) for n in range(4)]
        while not llm.engine.scheduler.running:
            await asyncio.sleep(0.001)
        for task in tasks[1:]:
            task.cancel()
        result = await tasks[0]
        assert result.finish_reason == "length"
        assert len(result.token_ids) == LONG.max_tokens
        for task in tasks[1:]:
            with pytest.raises(asyncio.CancelledError):
                await task
        await rest(served)

    asyncio.run(main())
    at_rest(llm)


def test_a_loop_that_is_left_frees_its_request(llm: LLM) -> None:
    served = AsyncLLM(llm)

    async def main() -> None:
        async with aclosing(served.stream(PROMPTS[0], LONG)) as pieces:
            async for _ in pieces:
                break
        await rest(served)

    asyncio.run(main())
    at_rest(llm)


def test_a_request_that_cannot_be_served_raises_in_its_task_alone(llm: LLM) -> None:
    served = AsyncLLM(llm)

    async def main() -> None:
        good = asyncio.create_task(served.generate(PROMPTS[0], PARAMS))
        with pytest.raises(RequestError, match="token id 99"):
            await served.generate({"prompt_token_ids": [99]}, PARAMS)
        with pytest.raises(RequestError, match="token id 99"):
            await served.generate([PROMPTS[1], {"prompt_token_ids": [99]}], LONG)
        assert (await good).finish_reason == "length"
        await rest(served)

    asyncio.run(main())
    at_rest(llm)


def test_a_prompt_that_is_too_long_takes_no_time_of_the_steps(llm: LLM) -> None:
    """All requests waited for seconds while the thread of steps took a prompt of a few MB."""
    served = AsyncLLM(llm)

    async def main() -> None:
        with pytest.raises(PromptTooLongError, match="the prompt has 3000 tokens"):
            await served.generate({"prompt_token_ids": [5] * 3000}, PARAMS)
        assert next(served._numbers) == 0  # no request was made

    asyncio.run(main())


def test_a_step_that_fails_is_told_to_all_and_the_next_request_is_served(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, step = AsyncLLM(llm), llm.engine.step

    def broken() -> None:
        monkeypatch.setattr(llm.engine, "step", step)
        raise RuntimeError("the device is gone")

    async def main() -> None:
        monkeypatch.setattr(llm.engine, "step", broken)
        with pytest.raises(RuntimeError, match="device is gone"):
            await served.generate(PROMPTS[0], PARAMS)
        assert (await served.generate(PROMPTS[0], PARAMS)).finish_reason == "length"

    asyncio.run(main())
    at_rest(llm)


def test_what_a_failed_step_has_completed_is_no_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a step fills pages of another request, for which there may be no memory."""
    served, step = AsyncLLM(llm), llm.engine.step

    def fails() -> list[Sequence]:
        advanced = step()
        if any(sequence.is_finished for sequence in advanced):
            raise CapacityError("no memory for a stored prefix")
        return advanced

    async def main() -> None:
        with llm.engine.lock:  # no step before both are there
            long = asyncio.create_task(served.generate(PROMPTS[1], LONG))
            short = asyncio.create_task(served.generate(PROMPTS[0], PARAMS))
            await asyncio.sleep(0.1)
            monkeypatch.setattr(llm.engine, "step", fails)
        assert (await short).finish_reason == "length"
        with pytest.raises(CapacityError, match="stored prefix"):
            await long
        await rest(served)

    asyncio.run(main())
    at_rest(llm)


def test_all_requests_end_with_an_error(llm: LLM) -> None:
    """Tokens that come after it do not hide it, and requests that begin later end, too."""
    served, error = AsyncLLM(llm), RequestError("it is over")

    async def reads(stream: AsyncGenerator[Piece, None], got: list[int]) -> None:
        async for piece in stream:
            got += piece.token_ids
            if len(got) == 1:
                await asyncio.sleep(0.1)  # tokens arrive on both sides of the error

    async def main() -> None:
        lists: list[list[int]] = [[], []]
        tasks = [asyncio.ensure_future(reads(served.stream([5, 6, 7], LONG), x)) for x in lists]
        while not all(lists):
            await asyncio.sleep(0)
        served.end(error)
        for task in tasks:
            with pytest.raises(RequestError, match="it is over"):
                await task
        with pytest.raises(RequestError, match="it is over"):
            await served.generate([5, 6, 7], PARAMS)
        await rest(served)

    asyncio.run(main())
    at_rest(llm)


@pytest.mark.slow
@pytest.mark.slow
def test_no_step_runs_when_python_ends(tmp_path: Path) -> None:
    """Ctrl-C in `keyhole batch` ended one run in five by SIGABRT: Python ended the thread of the
    steps while it computed.
    """
    program = f"""
import asyncio, atexit, threading
atexit.register(lambda: print([t.name for t in threading.enumerate()]))  # the last one to run
from keyhole import LLM, AsyncLLM, SamplingParams
served = AsyncLLM(LLM({make_model("llama", tmp_path, vocab_size=64)!r}, memory="8MiB"))

async def first() -> None:
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    pieces = served.stream([5, 6], params)
    await anext(pieces)
    globals().update(kept=pieces)  # it is not left

loop = asyncio.new_event_loop()
loop.run_until_complete(first())
"""
    line = [sys.executable, "-c", program]
    ran = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "['MainThread']\n"


def test_threads_may_use_the_llm_meanwhile(llm: LLM) -> None:
    wanted = [llm.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]
    served = AsyncLLM(llm)

    async def main() -> None:
        some = [served.generate(prompt, PARAMS) for prompt in PROMPTS]
        others = [asyncio.to_thread(llm.generate, prompt, PARAMS) for prompt in PROMPTS]
        found = await asyncio.gather(*some, *others)
        assert [result.token_ids for result in found] == wanted * 2

    asyncio.run(main())
    at_rest(llm)


def test_documents_are_asked_as_by_the_llm(llm: LLM, tmp_path: Path) -> None:
    llm = LLM(llm.engine.model, documents=tmp_path / "documents", memory="8MiB")
    for n in range(3):
        llm.documents.add(f"d{n}", {"prompt_token_ids": [5 + (n + i) % 40 for i in range(20)]})
    wanted = llm.ask(PROMPTS[0], ["d0", "d1"], reuse="reuse", params=PARAMS)

    async def main() -> None:
        served = AsyncLLM(llm)
        asked = [
            served.ask(PROMPTS[0], ["d0", "d1"], reuse="reuse", params=PARAMS) for _ in range(5)
        ]
        for result in await asyncio.gather(*asked):
            assert result.token_ids == wanted.token_ids
            assert result.reused is not None
        await rest(served)

    asyncio.run(main())
    at_rest(llm)


def test_a_chat_gives_as_many_completions_as_asked_for(tmp_path: Path) -> None:
    llm = LLM(make_model("llama", tmp_path, tokenizer=True, vocab_size=300), memory="8MiB")
    messages = [{"role": "user", "content": "what?"}]
    params = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=2, ignore_eos=True)
    wanted = llm.chat(messages, params)
    found = asyncio.run(AsyncLLM(llm).chat(messages, params))
    assert [one.token_ids for one in found.completions] == [
        one.token_ids for one in wanted.completions
    ]
    assert len(found.completions) == 3
    at_rest(llm)

"""The two sides of a server in two processes, here in two threads of one."""

from __future__ import annotations

import asyncio
import copy
import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from keyhole import LLM, ConfigError, KeyholeError, RequestError, SamplingParams
from keyhole.errors import StorageFullError, UnknownNameError
from keyhole.server.two_processes import EngineServer, Link, RemoteLLM
from keyhole.step_thread import Submission
from tests.checkpoints import make_model

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    path = make_model("llama", folder, tokenizer=True, vocab_size=300)
    return LLM(path, memory="8MiB", max_batch=8, documents=folder / "documents")


@pytest.fixture(autouse=True)
def _at_rest(llm: LLM) -> Iterator[None]:
    """Afterwards nothing runs, and no page is held but by the prefix cache."""
    yield
    with llm.engine.lock:
        assert not llm.engine.has_work
        llm.engine.check_integrity()


@asynccontextmanager
async def remote(llm: LLM) -> AsyncIterator[RemoteLLM]:
    """The side of HTTP; the block ends when all requests have."""
    here, there = socket.socketpair()
    engine = EngineServer(llm, there, interval=0.05)
    thread = threading.Thread(target=engine.run)
    thread.start()
    served, lost = RemoteLLM(llm, Link(here)), asyncio.Event()
    await served.open(drain=lambda: None, lost=lost.set)
    try:
        yield served
        while not engine._steps.is_idle:
            await asyncio.sleep(0.001)
    finally:
        there.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(thread.join)
        there.close()
        await asyncio.wait_for(lost.wait(), 10)
        assert served._link._writer is not None
        served._link._writer.close()
        await served._link._writer.wait_closed()


@pytest.mark.slow
def test_requests_get_what_each_gets_alone(llm: LLM) -> None:
    prompts = [f"{'abcdefgh'[n % 8]} question {n}" for n in range(20)]
    alone = [llm.generate(prompt, PARAMS) for prompt in prompts]

    async def streamed(served: RemoteLLM, prompt: str) -> tuple[str, list[int]]:
        text, tokens = "", []
        async for piece in served.stream(prompt, PARAMS):
            text += piece.text
            tokens += piece.token_ids
        assert piece.result is not None
        assert (piece.result.text, piece.result.token_ids) == (text, tokens)
        return text, tokens

    async def main() -> list[tuple[str, list[int]]]:
        async with remote(llm) as served:
            return await asyncio.gather(*(streamed(served, prompt) for prompt in prompts))

    assert asyncio.run(main()) == [(one.text, one.token_ids) for one in alone]


def test_completions_of_a_prompt_with_logprobs_and_reads(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=2, logprobs=2, trace=True)
    wanted = llm.generate("what?", params).completions

    async def main() -> list[list[Any]]:
        async with remote(llm) as served:

            async def pieces(stream: Any) -> list[Any]:
                return [piece async for piece in stream]

            return await asyncio.gather(*map(pieces, served.streams("what?", params)))

    for pieces, result in zip(asyncio.run(main()), wanted, strict=True):
        assert [token for one in pieces for token in one.token_ids] == result.token_ids
        found = [best for one in pieces for best in one.logprobs]
        # Which requests share a step, on which rounding depends, is a matter of when they arrive.
        assert found == [pytest.approx(best, abs=1e-5) for best in result.logprobs or ()]
        assert sum(len(one.reads) for one in pieces) == len(result.reads or ())
        assert pieces[0].prompt_token_ids == result.prompt_token_ids
        assert pieces[-1].result.finish_reason == result.finish_reason


def test_errors_come_back_as_they_were(llm: LLM) -> None:
    async def main() -> None:
        async with remote(llm) as served:
            with pytest.raises(RequestError, match="token id 999"):
                await served.generate({"prompt_token_ids": [999]}, PARAMS)
            with pytest.raises(UnknownNameError, match="unknown policy 'delte'; did you mean"):
                await served.generate("x", PARAMS, policy="delte")

    asyncio.run(main())


def test_a_failed_step_is_reported_to_all_and_logged_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = llm.engine.step

    def broken() -> None:
        scheduler = llm.engine.scheduler
        if len(scheduler.waiting) + len(scheduler.running) == 3:
            raise RuntimeError("the device is gone")
        step()

    monkeypatch.setattr(llm.engine, "step", broken)

    async def main() -> None:
        async with remote(llm) as served:
            tasks = [asyncio.ensure_future(served.generate("x", LONG)) for _ in range(3)]
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, KeyholeError)
                assert "the server's log has details" in str(error)
            assert (await served.generate("x", PARAMS)).finish_reason == "length"

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "the device is gone" in caplog.text
    assert len(caplog.records) == 1


def test_who_leaves_frees_its_request(llm: LLM) -> None:
    async def main() -> None:
        async with remote(llm) as served:
            async with aclosing(served.stream("abc", LONG)) as pieces:
                async for _ in pieces:
                    break
            while llm.engine.has_work:
                await asyncio.sleep(0.001)
            task = asyncio.ensure_future(served.generate("abc", LONG))
            while not llm.engine.scheduler.running:
                await asyncio.sleep(0.001)
            load = await asyncio.to_thread(served.load)
            assert load.pages_free < llm.engine.max_pages
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_documents_are_encoded_there_and_read_here(llm: LLM) -> None:
    text = "a b c d e f g h " * 25

    async def main() -> None:
        async with remote(llm) as served:
            seen: list[tuple[int, int]] = []
            info = await asyncio.to_thread(
                lambda: served.documents.add("one", text, progress=lambda *x: seen.append(x))
            )
            assert seen[-1] == (info.tokens, info.tokens)
            assert served.documents.text("one") == text
            assert llm.documents.get("one") == info
            with pytest.raises(ConfigError, match="the document is empty"):
                await asyncio.to_thread(served.documents.add, "empty", "")

            def enough(done: int, tokens: int) -> None:
                raise StorageFullError("enough")

            with pytest.raises(StorageFullError, match="enough"):
                await asyncio.to_thread(
                    lambda: served.documents.add("two", text + "z", progress=enough)
                )
            assert [one.name for one in served.documents.list()] == ["one"]
            answer = await served.ask("what?", ["one"], reuse="reuse", params=PARAMS)
            assert answer.reused is not None
            assert answer.reused.documents == ["one"]

    asyncio.run(main())


def test_the_engines_side_ends_after_its_last_document(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ended while a thread encoded one, which aborted it."""
    reached, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(name: str, text: str, *, progress: Any) -> None:
        reached.set()
        assert go_on.wait(60)
        try:
            progress(0, 1)
        finally:
            ended.set()

    monkeypatch.setattr(llm.documents, "add", slow)
    here, there = socket.socketpair()
    engine = EngineServer(llm, there, interval=0.05)
    engine._add(1, {"name": "late", "text": "x"})
    assert reached.wait(60)
    here.close()
    thread = threading.Thread(target=engine.run)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    go_on.set()
    thread.join(60)
    assert ended.is_set()
    assert not engine._encoding
    there.close()


def test_the_engines_side_ends_with_its_last_step(llm: LLM) -> None:
    """As above, with requests that run after the drain timeout."""
    here, there = socket.socketpair()
    engine = EngineServer(llm, there, interval=0.05)
    arguments = {"prompt": "abc", "params": LONG}
    engine._steps.start(1, Submission(method="submit", arguments=arguments))
    assert here.recv(1)  # a socket closed with more to read resets the connection
    here.close()
    engine.run()
    assert engine._steps.is_idle
    assert not llm.engine.has_work
    there.close()


@pytest.mark.parametrize("sent", [b"\0" * 3, (100).to_bytes(8, "big") + b"\x80\x05"])
def test_the_engines_side_ends_within_a_message(llm: LLM, sent: bytes) -> None:
    here, there = socket.socketpair()
    here.sendall(sent)
    here.close()
    EngineServer(llm, there, interval=0.05).run()
    there.close()


def test_an_error_made_of_other_arguments_can_be_copied() -> None:
    error = UnknownNameError("policy", "delte", ["delta"])
    assert str(copy.copy(error)) == str(error)

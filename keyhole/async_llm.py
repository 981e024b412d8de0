"""`AsyncLLM`: an `LLM` for asyncio. One thread runs the steps; tasks await the results.

    llm = AsyncLLM(LLM("path-or-hub-id", policy=Delta(token_budget=1024)))
    result = await llm.generate("prompt")
    async for piece in llm.stream("prompt"):
        print(piece.text, end="")

Nothing blocks the event loop: tokenising, opening documents and steps happen in the thread, which
ends when there is nothing to do. A task that is cancelled, or leaves its `async for`, frees its
request within a step.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from keyhole.config import SamplingParams
from keyhole.engine.request import PolicySpec
from keyhole.engine.sequence import Piece, Result, Sequence, piece_of
from keyhole.errors import ConfigError
from keyhole.llm import LLM, Params, params_for
from keyhole.reuse.base import Reuse
from keyhole.tokenization import Message, Prompt, Prompts, Tool, one_or_several

#: Makes the request, in the thread that runs steps; documents are open until the stack is closed.
_Submit = Callable[[ExitStack], Sequence]


@dataclass(eq=False)
class _Request:
    """A task's request. `given`: tokens that the task has; `is_left`: nobody waits any more."""

    submit: _Submit
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Piece | BaseException]
    stack: ExitStack = field(default_factory=ExitStack)
    sequence: Sequence | None = None
    given: int = 0
    is_left: bool = False

    new: Piece | BaseException | None = None

    def put(self, piece: Piece | BaseException) -> None:
        """Keeps what a step gave until all requests of that step have theirs."""
        self.new = piece


def _deliver(requests: Iterable[_Request]) -> None:
    """Hands out what a step gave: each event loop is woken once, not once for each request."""
    ready: dict[asyncio.AbstractEventLoop, list[_Request]] = {}
    for request in requests:
        if request.new is not None:
            ready.setdefault(request.loop, []).append(request)
    for loop, those in ready.items():
        given = [(one.pieces, one.new) for one in those]
        try:
            loop.call_soon_threadsafe(_put_all, given)
        except RuntimeError:  # the loop is closed: its tasks have left
            for request in those:
                request.is_left = True
        for request in those:
            request.new = None


def _put_all(given: list[tuple[asyncio.Queue[Any], Any]]) -> None:
    for pieces, piece in given:
        pieces.put_nowait(piece)


class AsyncLLM:
    """The methods of an `LLM`, to be awaited; hundreds of tasks may wait at once.

    The `LLM` stays usable from threads meanwhile.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):  # its thread would end, and every request wait for ever
            raise ConfigError(f"AsyncLLM takes an LLM, such as AsyncLLM(LLM('tiny')), not {llm!r}")
        self.llm = llm
        self._guard = threading.Lock()  # of what follows
        self._new: list[_Request] = []
        self._thread: threading.Thread | None = None

    @overload  # a text is also an iterable of texts
    async def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str | Mapping[str, Any],
        params: Params = None,
        *,
        policy: PolicySpec | None = None,
    ) -> Result: ...
    @overload
    async def generate(
        self, prompts: Several[int], params: Params = None, *, policy: PolicySpec | None = None
    ) -> Result: ...
    @overload
    async def generate(
        self, prompts: Iterable[Prompt], params: Params = None, *, policy: PolicySpec | None = None
    ) -> list[Result]: ...
    async def generate(
        self, prompts: Prompts, params: Params = None, *, policy: PolicySpec | None = None
    ) -> Result | list[Result]:
        """As `LLM.generate`: one Result for one prompt, a list of Results for a list.

        If one of a list fails, or the task is cancelled, the others are freed.
        """
        alone, wanted = one_or_several(prompts)
        each = params_for(params, len(wanted))
        tasks = [
            asyncio.ensure_future(
                self._completions(functools.partial(self.llm.submit, prompt, policy=policy), one)
            )
            for prompt, one in zip(wanted, each, strict=True)
        ]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return results[0] if alone else results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        policy: PolicySpec | None = None,
        caller: str = "",
    ) -> AsyncGenerator[Piece, None]:
        """As `LLM.stream`, for `async for`. caller: those of several callers take turns."""
        return self._pieces(lambda _: self.llm.submit(prompt, params, policy=policy, caller=caller))

    def streams(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        policy: PolicySpec | None = None,
        caller: str = "",
    ) -> list[AsyncGenerator[Piece, None]]:
        """A stream for each of the `params.n` completions of a prompt, to be read at once.

        Those after the first wait for the computation of the prompt, and share it.
        """
        submit = functools.partial(self.llm.submit, prompt, policy=policy, caller=caller)
        return self._sharing(submit, params_for(params, 1)[0])

    async def chat(
        self,
        messages: Several[Message],
        params: SamplingParams | None = None,
        *,
        tools: Several[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reuse_generated: bool = False,
        policy: PolicySpec | None = None,
    ) -> Result:
        """As `LLM.chat`."""
        submit = functools.partial(
            self.llm.submit_chat,
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            reuse_generated=reuse_generated,
            policy=policy,
        )
        return await self._completions(submit, params_for(params, 1)[0])

    def stream_chat(
        self,
        messages: Several[Message],
        params: SamplingParams | None = None,
        *,
        tools: Several[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reuse_generated: bool = False,
        policy: PolicySpec | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """As `LLM.stream_chat`, for `async for`."""
        return self._pieces(
            lambda _: self.llm.submit_chat(
                messages,
                params,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                reuse_generated=reuse_generated,
                policy=policy,
            )
        )

    async def ask(
        self,
        question: Prompt,
        documents: Several[str],
        *,
        reuse: Reuse | str | Path | None = None,
        params: SamplingParams | None = None,
        prefix: Prompt = "",
        separator: Prompt = "",
        chat: bool = False,
        policy: PolicySpec | None = None,
    ) -> Result:
        """As `LLM.ask`."""
        pieces = self.stream_ask(
            question,
            documents,
            reuse=reuse,
            params=params,
            prefix=prefix,
            separator=separator,
            chat=chat,
            policy=policy,
        )
        return await _last(pieces)

    def stream_ask(
        self,
        question: Prompt,
        documents: Several[str],
        *,
        reuse: Reuse | str | Path | None = None,
        params: SamplingParams | None = None,
        prefix: Prompt = "",
        separator: Prompt = "",
        chat: bool = False,
        policy: PolicySpec | None = None,
        caller: str = "",
    ) -> AsyncGenerator[Piece, None]:
        """As `LLM.stream_ask`, for `async for`."""
        return self._pieces(
            lambda stack: self.llm.submit_ask(
                stack,
                question,
                documents,
                reuse=reuse,
                params=params,
                prefix=prefix,
                separator=separator,
                chat=chat,
                policy=policy,
                caller=caller,
            )
        )

    async def _completions(
        self, submit_after: Callable[..., Sequence], params: SamplingParams
    ) -> Result:
        """All completions of a prompt."""
        streams = self._sharing(submit_after, params)
        tasks = [asyncio.ensure_future(_last(stream)) for stream in streams]
        try:
            return Result.of_all(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _sharing(
        self, submit_after: Callable[..., Sequence], params: SamplingParams
    ) -> list[AsyncGenerator[Piece, None]]:
        """A stream per completion; those after the first share its computation."""
        made: list[Sequence] = []

        def submit(one: SamplingParams, _: ExitStack) -> Sequence:
            made.append(submit_after(params=one, after=made[0] if made else None))
            return made[-1]

        return [self._pieces(functools.partial(submit, one)) for one in params.each()]

    async def _pieces(self, submit: _Submit) -> AsyncGenerator[Piece, None]:
        request = _Request(submit, asyncio.get_running_loop(), asyncio.Queue())
        self._start(request)
        try:
            while True:
                piece = await request.pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
                if piece.result is not None:
                    return
        finally:
            request.is_left = True

    def _start(self, request: _Request) -> None:
        with self._guard:
            self._new.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="keyhole", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """The thread: takes new requests, runs a step, hands out pieces, until all is done."""
        running: list[_Request] = []
        while True:
            with self._guard:
                taken, self._new = self._new, []
                if not (taken or running):
                    self._thread = None
                    return
            running = self._step(running + taken)

    def _step(self, requests: list[_Request]) -> list[_Request]:
        """One step for all; the requests that are not done."""
        engine = self.llm.engine
        left = []
        with engine.lock:
            for request in requests:
                self._submit_or_free(request)
            if any(one.sequence and not one.sequence.is_finished for one in requests):
                try:
                    engine.step()
                except Exception as error:  # noqa: BLE001 - every caller that waits for this step gets it
                    for request in requests:
                        self._fail(request, error)
            for request in requests:
                self._hand_out(request)
            _deliver(requests)
            for request in requests:
                if request.sequence is None:
                    request.stack.close()
                else:
                    left.append(request)
        return left

    def _submit_or_free(self, request: _Request) -> None:
        if request.is_left:
            self._free(request)
        elif request.sequence is None:
            try:
                request.sequence = request.submit(request.stack)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                request.put(error)

    def _hand_out(self, request: _Request) -> None:
        """What is new; a request that is done, or failed, has no sequence after it."""
        if request.sequence is None:
            return
        try:
            piece = piece_of(request.sequence, request.given)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._fail(request, error)
            return
        if piece is not None:
            request.given += len(piece.token_ids)
            request.put(piece)
            if piece.result is not None:
                request.sequence = None

    def _fail(self, request: _Request, error: BaseException) -> None:
        if request.sequence is not None:
            self._free(request)
            request.put(error)

    def _free(self, request: _Request) -> None:
        if request.sequence is not None:
            self.llm.engine.abort(request.sequence)
            request.sequence = None


async def _last(pieces: AsyncGenerator[Piece, None]) -> Result:
    async with aclosing(pieces):
        async for piece in pieces:
            if piece.result is not None:
                return piece.result
    raise AssertionError("the last piece has the result")

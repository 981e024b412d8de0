"""`AsyncLLM`: an `LLM` for asyncio. One thread runs the steps; tasks await the results.

    llm = AsyncLLM(LLM("path-or-hub-id", policy=Delta(token_budget=1024)))
    result = await llm.generate("prompt")
    async for piece in llm.stream("prompt"):
        print(piece.text, end="")

Nothing blocks the event loop: the thread opens documents and runs steps, and ends when there is no
work; other threads tokenise prompts. When a task is cancelled, or leaves its `async for`, its
request is freed within a step. A slow reader does not slow other tasks: the tokens that arrive
meanwhile become its next piece.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable, Mapping
from collections.abc import Sequence as Several
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, overload

from keyhole.config import SamplingParams, is_number, require
from keyhole.engine.documents.library import Documents
from keyhole.engine.engine import Engine
from keyhole.engine.request import PolicySpec
from keyhole.engine.sequence import Piece, Result
from keyhole.errors import ConfigError
from keyhole.llm import LLM, Params, arguments_of, params_for
from keyhole.reuse.base import Reuse
from keyhole.step_thread import Extras, Method, StepThread, Submission, Update
from keyhole.tokenization import Detokenizer, Prompt, Prompts, one_or_several


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """A snapshot of an engine.

    waiting: requests that no step has begun. pages_free: pages that hold nothing; pages_cached:
    pages of the prefix cache, which are evicted when requests need them.
    """

    waiting: int
    pages_free: int
    pages_cached: int
    offloaded_layers: int


def load_of(engine: Engine) -> EngineLoad:
    """The current load, without waiting for a step."""
    return EngineLoad(
        waiting=len(engine.scheduler.waiting),
        pages_free=engine.cache.available,
        pages_cached=0 if engine.prefix is None else engine.prefix.num_pages,
        offloaded_layers=0 if engine.offloader is None else engine.offloader.offloaded,
    )


class Steps(Protocol):
    """Where requests run: a `StepThread`, here or in another process."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is running or waiting."""
        ...

    def start(self, number: int, call: Submission) -> None:
        """Takes a request."""

    def leave(self, number: int) -> None:
        """Frees a request."""


class _Inbox:
    """The updates that a task has not taken yet. Used in the task's event loop."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.loop = asyncio.get_running_loop()
        self._text = Detokenizer(tokenizer, params.stop, skip_special=params.skip_special_tokens)
        self._updates: list[Update] = []
        self._has_some = asyncio.Event()

    def put(self, update: Update) -> None:
        """Adds an update; none follows an error."""
        if not (self._updates and _error_of(self._updates[-1])):
            self._updates.append(update)
            self._has_some.set()

    async def take(self) -> Piece:
        """Waits for updates and returns all as one piece; raises the request's error, if any."""
        await self._has_some.wait()
        updates, self._updates = self._updates, []
        self._has_some.clear()
        *before, last = updates
        error = _error_of(last)
        if error is not None:
            if not before:
                raise error
            self.put(last)  # raised after the earlier updates
            return self._piece(before)
        return self._piece(updates)

    def _piece(self, updates: list[Update]) -> Piece:
        tokens = [token for update in updates for token in update.tokens]
        found = [update.extras for update in updates if update.extras is not None]
        if not found:
            return Piece(text=self._add(tokens), token_ids=tokens)
        last = found[-1]
        text = self._add(tokens[: len(tokens) - last.num_silent], final=last.result is not None)
        result = last.result and replace(last.result, text=self._text.text)
        return Piece(
            text=text,
            token_ids=tokens,
            logprobs=_joined(found, "logprobs"),
            reads=_joined(found, "reads"),
            prompt_token_ids=found[0].prompt_token_ids,
            stats=last.stats,
            result=result,
        )

    def _add(self, tokens: list[int], *, final: bool = False) -> str:
        for token in tokens:
            self._text.append(token)
        if final:
            self._text.finish()
        return self._text.take(final=final)


def _error_of(update: Update) -> BaseException | None:
    return None if update.extras is None else update.extras.error


def _joined(parts: list[Extras], name: str) -> list[Any] | None:
    """The lists of this name in all parts, concatenated; None if no part has one."""
    lists = [found for part in parts if (found := getattr(part, name)) is not None]
    return list(itertools.chain.from_iterable(lists)) if lists else None


def _put_all(given: list[tuple[_Inbox, Update]]) -> None:
    for inbox, update in given:
        inbox.put(update)


class AsyncLLM:
    """The methods of an `LLM` as coroutines; hundreds of tasks may wait at once.

    The `LLM` stays usable from threads.

    stream_interval: the most seconds that a stream's tokens wait for the next ones when many
    streams run, which saves work in the event loop; its first and last pieces never wait.
    """

    def __init__(self, llm: LLM, *, stream_interval: float = 0.0) -> None:
        # With others the thread would fail, and requests would wait for ever.
        if not isinstance(llm, LLM):
            raise ConfigError(f"AsyncLLM takes an LLM, such as AsyncLLM(LLM('tiny')), not {llm!r}")
        good = is_number(stream_interval) and stream_interval >= 0
        require(good, "stream_interval", stream_interval, "a number of seconds, at least 0")
        self.llm = llm
        self._inboxes: dict[int, _Inbox] = {}
        self._ended: Exception | None = None
        self._numbers = itertools.count()
        self._steps: Steps = StepThread(llm, self._deliver, stream_interval)

    @property
    def documents(self) -> Documents:
        """The documents of the `LLM`; `add` waits for the engine, so call it in a thread."""
        return self.llm.documents

    def load(self) -> EngineLoad:
        """The engine's current load."""
        return load_of(self.llm.engine)

    def end(self, error: Exception) -> None:
        """Ends all requests with an error, after their tokens so far; later ones begin with it.

        Call it in the event loop of the requests.
        """
        self._ended = error
        for number, inbox in self._inboxes.items():
            inbox.put(Update(number, [], Extras(error=error)))

    @overload  # a string is also an iterable of strings
    async def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: Params = None, *, policy: PolicySpec | None = None
    ) -> Result: ...
    @overload
    async def generate(
        self, prompts: Iterable[Prompt], params: Params = None, *, policy: PolicySpec | None = None
    ) -> list[Result]: ...
    async def generate(
        self, prompts: Prompts, params: Params = None, *, policy: PolicySpec | None = None
    ) -> Result | list[Result]:
        """As `LLM.generate`: one Result for one prompt, a list of Results for a list.

        If one prompt of a list fails, or the task is cancelled, the other requests are freed.
        """
        alone, wanted = one_or_several(prompts)
        each = params_for(params, len(wanted))
        tasks = [
            asyncio.ensure_future(
                self._completions("submit", {"prompt": prompt, "policy": policy}, one)
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
        """As `LLM.stream`, for `async for`. caller: requests of several callers take turns."""
        given = {"prompt": prompt, "policy": policy, "caller": caller}
        return self._pieces("submit", given, params)

    def streams(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        policy: PolicySpec | None = None,
        caller: str = "",
    ) -> list[AsyncGenerator[Piece, None]]:
        """A stream for each of the `params.n` completions of a prompt; read them concurrently.

        The prompt is computed once, for the first; the others wait for it.
        """
        given = {"prompt": prompt, "policy": policy, "caller": caller}
        return self._sharing("submit", given, params_for(params, 1)[0])

    @arguments_of(LLM.chat)
    async def chat(self, *, params: SamplingParams | None = None, **given: Any) -> Result:
        """As `LLM.chat`."""
        return await self._completions("submit_chat", given, params_for(params, 1)[0])

    @arguments_of(LLM.chat)
    def stream_chat(
        self, *, params: SamplingParams | None = None, **given: Any
    ) -> AsyncGenerator[Piece, None]:
        """As `LLM.stream_chat`, for `async for`."""
        return self._pieces("submit_chat", given, params)

    @arguments_of(LLM.ask)
    async def ask(self, **arguments: Any) -> Result:
        """As `LLM.ask`."""
        return await _last(self.stream_ask(**arguments))

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
        given = {
            "question": question,
            "documents": documents,
            "reuse": reuse,
            "prefix": prefix,
            "separator": separator,
            "chat": chat,
            "policy": policy,
            "caller": caller,
        }
        return self._pieces("submit_ask", given, params)

    async def _completions(
        self, method: Method, given: Mapping[str, Any], params: SamplingParams
    ) -> Result:
        """Generates all completions of a prompt."""
        streams = self._sharing(method, given, params, whole=True)
        tasks = [asyncio.ensure_future(_last(stream)) for stream in streams]
        try:
            return Result.of_all(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _sharing(
        self,
        method: Method,
        given: Mapping[str, Any],
        params: SamplingParams,
        *,
        whole: bool = False,
    ) -> list[AsyncGenerator[Piece, None]]:
        """A stream per completion; all share one computation of the prompt."""
        each = params.each()
        group = next(self._numbers) if len(each) > 1 else None
        return [self._pieces(method, given, one, group=group, whole=whole) for one in each]

    async def _pieces(
        self,
        method: Method,
        given: Mapping[str, Any],
        params: SamplingParams | None,
        *,
        group: int | None = None,
        whole: bool = False,
    ) -> AsyncGenerator[Piece, None]:
        (params,) = params_for(params, 1)
        prompt = given.get("prompt")
        if isinstance(prompt, str):  # tokenised here, so that no step waits for a long text
            tokens = await asyncio.to_thread(self.llm.tokens, prompt)
            prompt = {"prompt_token_ids": tokens}
            given = {**given, "prompt": prompt}
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        if isinstance(ids, list):  # refused here: all requests wait while a thread takes it
            self.llm.engine.limits.check_length(len(ids))
        if self._ended is not None:
            raise self._ended
        number, inbox = next(self._numbers), _Inbox(self.llm.tokenizer, params)
        self._inboxes[number] = inbox
        arguments = {**given, "params": params}
        request = Submission(method=method, arguments=arguments, group=group, whole=whole)
        self._steps.start(number, request)
        try:
            while True:
                piece = await inbox.take()
                yield piece
                if piece.result is not None:
                    return
        finally:
            del self._inboxes[number]
            self._steps.leave(number)

    def _deliver(self, updates: Iterable[Update]) -> None:
        """Distributes a step's updates; wakes each event loop once, not once per request."""
        ready: dict[asyncio.AbstractEventLoop, list[tuple[_Inbox, Update]]] = {}
        for update in updates:
            inbox = self._inboxes.get(update.number)
            if inbox is not None:
                ready.setdefault(inbox.loop, []).append((inbox, update))
        for loop, given in ready.items():
            try:
                loop.call_soon_threadsafe(_put_all, given)
            except RuntimeError:  # the loop is closed: its tasks have left
                for _, update in given:
                    self._steps.leave(update.number)


async def _last(pieces: AsyncGenerator[Piece, None]) -> Result:
    async with aclosing(pieces):
        async for piece in pieces:
            if piece.result is not None:
                return piece.result
    raise AssertionError("the last piece has the result")

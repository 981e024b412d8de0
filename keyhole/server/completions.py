"""/v1/chat/completions and /v1/completions: one or several completions, whole or as a stream."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from keyhole.config import SamplingParams
from keyhole.engine.sequence import Piece, Result
from keyhole.reuse import make_reuse
from keyhole.reuse.base import Reuse
from keyhole.server.answers import Answer, AnswerReads, AnyAnswer, TextOffsets
from keyhole.server.bodies import ChatBody, CompletionBody, SamplingBody, SearchedDocuments
from keyhole.server.chat.grammars import answer_rule, constraint_of, grammar_of
from keyhole.server.chat.prompt import prepared, reply_to_question
from keyhole.server.chat.reply import Reply
from keyhole.server.documents.passages import passages_of
from keyhole.server.documents.routes import search
from keyhole.server.errors import GONE, ApiError, api_error, concerning, is_failure
from keyhole.server.state import State, state_of

logger = logging.getLogger("keyhole.server")
router = APIRouter()

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_Any = TypeVar("_Any")
_Stream = AsyncGenerator[Piece, None]
#: The passages that a finished prompt used of its documents.
_UsedPassages = Callable[[Result], list[dict[str, Any]]]


@router.post("/v1/chat/completions")
async def chat(body: ChatBody, request: Request) -> Response:
    """The next message of a conversation."""
    state = state_of(request)
    state.asked(body.messages)
    body.check_others()
    state.check_count(body.completions)
    policy = body.policy(state.llm.llm.policy, state.most_tokens)
    caller = caller_of(request, body.user)
    if body.documents is not None:
        return await _chat_over_documents(body, body.documents, request)
    if body.reuse is not None:
        raise ApiError(
            400, f"reuse {body.reuse!r} needs documents; name some, or leave it out", param="reuse"
        )
    asked = body.chat_request(body.messages, body.response_format)
    with concerning(body.chat_param):
        ready = await asyncio.to_thread(prepared, state.tokenizer, asked, state.config.tool_parser)
    params = body.chat_sampling(ready.grammar, state.adapter(body.model))
    if ready.keeps_special:
        params = dataclasses.replace(params, skip_special_tokens=False)
    prompt = {"prompt_token_ids": ready.token_ids}
    streams = state.llm.streams(prompt, params, policy=policy, caller=caller)
    replies = [ready.reply() for _ in streams]
    answer = _chat_answer(state, body, replies)
    return await respond(answer, body, request, streams)


async def _chat_over_documents(
    body: ChatBody, documents: list[str] | SearchedDocuments, request: Request
) -> Response:
    state = state_of(request)
    if body.tools:
        raise ApiError(400, "documents and tools cannot be combined; leave one out", param="tools")
    question, reuse = _question(body.messages), _reuse(body.reuse)
    names = await _names(state, documents, question)
    rule = answer_rule(body.response_format) or constraint_of(body.structured_outputs)
    replies = [reply_to_question(state.tokenizer, question) for _ in range(body.completions)]
    grammar = None if rule is None else grammar_of(rule)
    adapter = state.adapter(body.model)
    if adapter is not None:
        await asyncio.to_thread(_require_encoded, state, names, adapter)
    params = body.chat_sampling(grammar, adapter)
    policy = body.policy(state.llm.llm.policy, state.most_tokens)
    caller = caller_of(request, body.user)
    streams = [
        state.llm.stream_ask(
            question, names, reuse=reuse, params=one, chat=True, policy=policy, caller=caller
        )
        for one in params.each()
    ]
    used_passages = functools.partial(_used_passages, state, names, passages=body.passages)
    answer = _chat_answer(state, body, replies)
    return await respond(answer, body, request, streams, used_passages)


def _chat_answer(state: State, body: ChatBody, replies: list[Reply]) -> Answer:
    return Answer(
        "chat.completion",
        body.model or state.name,
        state.tokenizer,
        replies,
        body.completions,
        top_logprobs=body.top_logprobs or 0,
    )


@router.post("/v1/completions")
async def complete(body: CompletionBody, request: Request) -> Response:
    """The completion of a prompt, or of each of several."""
    state = state_of(request)
    state.asked(body.prompt)
    body.check_others()
    state.check_count(body.completions * len(body.prompts))
    rule = answer_rule(body.response_format) or constraint_of(body.structured_outputs)
    grammar = None if rule is None else grammar_of(rule)
    params = body.sampling(body.logprobs, grammar, state.adapter(body.model))
    policy = body.policy(state.llm.llm.policy, state.most_tokens)
    caller = caller_of(request, body.user)
    with concerning(lambda error: error.field or body.prompt_field):
        prompts = await asyncio.to_thread(_tokens_of, state, body.prompts, params)
    streams = [
        stream
        for prompt in prompts
        for stream in state.llm.streams(prompt, params, policy=policy, caller=caller)
    ]
    skip = params.skip_special_tokens
    answer = Answer(
        "text_completion",
        body.model or state.name,
        state.tokenizer,
        n=body.completions,
        offsets=[TextOffsets(state.tokenizer, skip_special=skip) for _ in streams],
    )
    return await respond(answer, body, request, streams)


def _tokens_of(
    state: State, prompts: Sequence[Any], params: SamplingParams
) -> list[dict[str, list[int]]]:
    """The prompts as tokens; the first error of any of them, which no stream has begun to hide."""
    llm, found = state.llm.llm, []
    for prompt in prompts:
        tokens = llm.tokens(prompt)
        llm.engine.limits.check_tokens(tokens, params)
        found.append({"prompt_token_ids": tokens})
    return found


def caller_of(request: Request, user: str | None) -> str:
    """The caller of a request, by API key and `user`. Callers take turns in the engine's queue."""
    return f"{request.headers.get('authorization', '')}\n{user or ''}"


def _question(messages: Sequence[dict[str, Any]]) -> str:
    """The user's message, with documents before it."""
    roles = [message.get("role") for message in messages]
    content = messages[0].get("content") if messages else None
    if roles != ["user"] or not isinstance(content, str):
        raise ApiError(
            400,
            f"documents need a single text message from the user, not messages of {roles}",
            param="messages",
        )
    return content


async def _names(state: State, given: list[str] | SearchedDocuments, question: str) -> list[str]:
    """Names of the documents; those found by a search are sorted, best first."""
    if isinstance(given, list):
        return given
    query = question if given.search.query is None else given.search.query
    found = await search(state, query, given.search.top_k)
    if not found:
        raise ApiError(
            400,
            f"no stored document matches {query[:80]!r}; use other words, or name documents",
            param="documents",
        )
    return [one.name for one in found]


def _require_encoded(state: State, names: Sequence[str], adapter: str) -> None:
    """ApiError for a document that this adapter has not encoded: the client may choose another."""
    documents = state.llm.llm.documents_with(adapter)
    for name in names:
        with concerning("documents"):
            found = documents.get(name)
        if not found.encoded:
            raise ApiError(
                400,
                f"document {name!r} is not encoded with adapter {adapter!r}; ask model "
                f"{state.name!r}, or run `keyhole documents add --adapter {adapter}`",
                param="documents",
            )


def _used_passages(
    state: State, names: list[str], result: Result, *, passages: bool
) -> list[dict[str, Any]]:
    """Name and used passages of each document; no passages if everything was computed."""
    if result.reused is None or not passages:
        return [{"name": name} for name in names]
    return passages_of(state.documents, result.reused, state.tokenizer)


def _reuse(given: str | dict[str, Any] | None) -> Reuse | None:
    with concerning("reuse"):
        if given is None or isinstance(given, str):
            return None if given is None else make_reuse(given)
        settings = dict(given)
        name = settings.pop("method", None)
        if not isinstance(name, str):
            raise ApiError(400, f"reuse.method {name!r} must be a method's name", param="reuse")
        return make_reuse(name, settings)


async def respond(
    answer: AnyAnswer,
    body: SamplingBody,
    request: Request,
    streams: list[_Stream],
    used_passages: _UsedPassages | None = None,
) -> Response:
    """The answer from its completions, whole or as a stream; freed when the client disconnects.

    used_passages: returns those that the first completion used.
    """
    state = state_of(request)
    limit = state.timeout(None if body.keyhole is None else body.keyhole.timeout)
    answering = _Answering(state, answer, streams, used_passages, limit)
    with concerning(body.param), ExitStack() as stack:
        stack.enter_context(state.admission.enter(len(streams)))
        if not body.stream:
            answered = await _unless_gone(request, answering.whole)
            return Response(status_code=GONE) if answered is None else answered
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        events = answering.events(stack.pop_all(), usage=usage)
        # A request that can never be served gets its own status.
        first = await _unless_gone(request, functools.partial(anext, events))
    if first is None:
        await events.aclose()
        return Response(status_code=GONE)
    sent = answering.after(first, events)
    return StreamingResponse(sent, media_type="text/event-stream", headers=_HEADERS)


@dataclasses.dataclass(frozen=True)
class _Answering:
    """A request that is being answered. limit: seconds that it may take; None: no limit."""

    state: State
    answer: AnyAnswer
    streams: list[_Stream]
    used_passages: _UsedPassages | None
    limit: float | None
    results: dict[int, Result] = dataclasses.field(default_factory=dict)

    async def whole(self) -> Response:
        """The whole answer."""
        async with asyncio.timeout(self.limit), aclosing(merged(self.streams)) as pieces:
            async for index, piece in pieces:
                self.answer.take(index, piece)
                self._keep(index, piece)
        ordered, documents = await self._finished()
        body = self.answer.whole(ordered, documents)
        for choice, result in zip(body.get("choices", ()), ordered, strict=False):
            if result.reads is not None:
                of = AnswerReads(self.state.tokenizer)
                choice["keyhole"] = await asyncio.to_thread(of.shown, result)
        return JSONResponse(body)

    async def events(self, stack: ExitStack, *, usage: bool) -> AsyncGenerator[bytes, None]:
        """Server-sent events; stack: closed with the stream."""
        answer = self.answer
        deadline = None if self.limit is None else asyncio.get_running_loop().time() + self.limit
        begun: set[int] = set()
        reads: dict[int, AnswerReads] = {}
        with stack:
            async with aclosing(_until(deadline, merged(self.streams))) as pieces:
                async for index, piece in pieces:
                    # Until the first piece, which shows that all can be served, errors have a
                    # status.
                    for event in [] if begun else answer.begin():
                        yield answer.frame(event)
                    for event in answer.piece(index, piece, first=index not in begun):
                        if piece.reads is not None and "choices" in event:
                            of = reads.setdefault(index, AnswerReads(self.state.tokenizer))
                            shown = await asyncio.to_thread(of.shown, piece)
                            event["choices"][0]["keyhole"] = shown
                        yield answer.frame(event)
                    begun.add(index)
                    self._keep(index, piece)
            ordered, documents = await self._finished(wanted=usage)
            for event in answer.closing(ordered, documents, wants_usage=usage):
                yield answer.frame(event)
            yield answer.end

    def _keep(self, index: int, piece: Piece) -> None:
        if piece.result is not None:
            self.results[index] = piece.result
            self.state.finished(piece.result)

    async def _finished(
        self, *, wanted: bool = True
    ) -> tuple[list[Result], list[dict[str, Any]] | None]:
        """The results in order, and the used passages of documents if they are wanted."""
        ordered = [self.results[index] for index in range(len(self.streams))]
        if self.used_passages is None or not wanted:
            return ordered, None
        return ordered, await asyncio.to_thread(self.used_passages, ordered[0])

    async def after(
        self, first: bytes, events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """The events after the first; an error ends them with an error object."""
        async with aclosing(events):
            yield first
            try:
                async for event in events:
                    yield event
            except Exception as error:
                found = api_error(error)
                self.state.metrics.failed(found.kind)
                if is_failure(error, found):
                    logger.exception("a stream failed")
                yield self.answer.frame(self.answer.failed(found))


async def _unless_gone(request: Request, work: Callable[[], Awaitable[_Any]]) -> _Any | None:
    """The result of `work`; None if the client disconnects first, which cancels it."""
    task, gone = asyncio.ensure_future(work()), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _until(
    deadline: float | None, pieces: AsyncGenerator[tuple[int, Piece], None]
) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces until a time of the event loop; then TimeoutError."""
    async with aclosing(pieces):
        while True:
            # A timeout cancels the task that entered it. Across a `yield` that may be a task which
            # no longer reads, so each wait has its own.
            async with asyncio.timeout_at(deadline):
                found = await anext(pieces, None)
            if found is None:
                return
            yield found


async def merged(streams: Sequence[_Stream]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all streams as they arrive, with their number; the first error ends all."""
    if len(streams) == 1:  # saves the queue at every token
        async with aclosing(streams[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    found: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

    async def drain(index: int, stream: _Stream) -> None:
        try:
            async with aclosing(stream):
                async for piece in stream:
                    found.put_nowait((index, piece))
        except Exception as error:  # noqa: BLE001 - the reader raises it
            found.put_nowait((index, error))

    tasks = [asyncio.ensure_future(drain(*numbered)) for numbered in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            index, given = await found.get()
            if isinstance(given, Exception):
                raise given
            left -= given.result is not None
            yield index, given
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

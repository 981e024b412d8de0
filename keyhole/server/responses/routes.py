"""The route of /v1/responses."""

from __future__ import annotations

import asyncio
import dataclasses

from fastapi import APIRouter, Request, Response

from keyhole.server.chat.prompt import prepared
from keyhole.server.chat.reply import Reply
from keyhole.server.completions import caller_of, respond
from keyhole.server.responses.answer import ResponseAnswer
from keyhole.server.responses.bodies import ResponsesBody
from keyhole.server.state import state_of

router = APIRouter()


@router.post("/v1/responses")
async def create(body: ResponsesBody, request: Request) -> Response:
    """The next response of a conversation."""
    state = state_of(request)
    state.asked(body.input)
    body.check_others()
    body.check()
    key = caller_of(request, None)
    messages = body.conversation(state.history.get(body.previous_response_id, key))
    ready = await asyncio.to_thread(
        prepared, state.tokenizer, body.chat_request(messages), state.config.tool_parser
    )
    params = body.sampling(None, ready.grammar, state.adapter(body.model))
    if ready.keeps_special:
        params = dataclasses.replace(params, skip_special_tokens=False)

    def done(name: str, reply: Reply) -> None:
        if body.store is not False:
            state.history.add(name, key, [*messages, reply.message()])

    answer = ResponseAnswer(body.model or state.name, body, ready.reply(), done)
    streams = state.llm.streams(
        {"prompt_token_ids": ready.token_ids},
        params,
        policy=body.policy(state.llm.llm.policy),
        caller=caller_of(request, body.user),
    )
    return await respond(answer, body, request, streams)

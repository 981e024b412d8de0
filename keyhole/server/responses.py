"""/v1/responses, OpenAI's newer interface for chats: a response, whole or as typed events."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Field
from pydantic_core import to_json

from keyhole.engine.sequence import Piece, Result
from keyhole.server.answers import usage
from keyhole.server.bodies import ConversationBody, SamplingBody, WholeNumber
from keyhole.server.chat.grammars import answer_rule
from keyhole.server.chat.prompt import ChatRequest, prepared
from keyhole.server.chat.reply import Event, Reasoning, Reply
from keyhole.server.chat.tool_parser import CallArguments, CallBegin
from keyhole.server.completions import caller_of, respond
from keyhole.server.errors import ApiError, concerning
from keyhole.server.state import state_of

_Documents = list[dict[str, Any]]
router = APIRouter()
_Message = dict[str, Any]
_TEXT_PARTS = {"input_text", "output_text", "text"}
#: Fields of any text or JSON that the response contains. Python reads NaN and halves of
#: characters, too.
_SENT_BACK = ("metadata", "reasoning", "text", "tool_choice", "tools", "user")
_ROLES = {"developer": "system"}
#: Unsupported fields that other bodies do not have, or have as something else.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # For a client to send back with later requests, which read no reasoning here.
    "include": ([], ["reasoning.encrypted_content"]),
    "prompt": (),  # a stored template
}


class ResponsesBody(ConversationBody):
    """/v1/responses. input: a string, or items: messages, function calls and their outputs.

    previous_response_id: of a response of this server, whose conversation is continued. store:
    whether a later request may continue this one.
    """

    unsupported: ClassVar = {**SamplingBody.unsupported, **_UNSUPPORTED}

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    n: WholeNumber | None = Field(1, ge=1, le=1)
    max_output_tokens: WholeNumber | None = Field(None, ge=1)
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    prompt_field: ClassVar[str] = "input"
    format_field: ClassVar[str] = "text.format"

    def conversation(self, before: Sequence[_Message]) -> list[_Message]:
        """The messages of an earlier response, followed by those of this request."""
        items: Any = self.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not items:
            raise ApiError(400, "input is empty; give a text or at least one item", param="input")
        messages = [*before]
        for item in items:
            _add(messages, item)
        return messages

    def request_of(self, messages: Sequence[_Message]) -> ChatRequest:
        """The chat. The instructions precede the messages and are not stored with them."""
        first = [] if self.instructions is None else [_message("system", self.instructions)]
        return self.chat_request([*first, *messages], self._format())

    @property
    def has_format(self) -> bool:
        """See `SamplingBody`."""
        kind: object = (self._format() or {}).get("type", "text")
        return kind != "text"

    def check(self) -> None:
        """ApiError for anything unsupported, or that the response cannot contain."""
        for name in _SENT_BACK:
            try:
                json.dumps(getattr(self, name), ensure_ascii=False, allow_nan=False).encode()
            except ValueError as error:
                message = f"{name} cannot be sent back: {error}"
                raise ApiError(400, message, param=name) from error
        if self.truncation not in (None, "disabled"):
            raise ApiError(400, "truncation must be 'disabled'", param="truncation")
        if self.max_output_tokens is not None:
            self.max_tokens = self.max_output_tokens

    def _format(self) -> Mapping[str, Any] | None:
        given = (self.text or {}).get("format")
        if given is None:
            return self.response_format
        if not isinstance(given, Mapping):
            raise ApiError(400, "text.format must be an object", param="text.format")
        schema = given.get("schema")
        if given.get("type") == "json_schema" and not isinstance(schema, Mapping):
            raise ApiError(400, "text.format needs a 'schema'", param="text.format")
        found = {**given, "json_schema": {"schema": schema}}
        answer_rule(found, "text.format")  # an error has the name that the client knows
        return found


def _add(messages: list[_Message], item: Mapping[str, Any]) -> None:
    """An item as a message; a call joins the assistant's message before it."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise ApiError(400, f"role {role!r} of a message must be a string", param="input")
        messages.append(_message(_ROLES.get(role, role), _content(item.get("content"))))
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        last = messages[-1]
        messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), call]}
    elif kind == "function_call_output":
        output = _message("tool", _content(item.get("output")))
        messages.append(output | {"tool_call_id": item.get("call_id")})
    elif kind != "reasoning":  # templates leave earlier reasoning out
        raise ApiError(400, f"an item of type {kind!r} is not supported", param="input")


def _message(role: str, content: Any) -> _Message:
    return {"role": role, "content": content}


def _content(given: Any) -> Any:
    """Text, or parts of text with the types that chats use; the chat refuses anything else."""
    if not isinstance(given, list):
        return given
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
        else part
        for part in given
    ]


@router.post("/v1/responses")
async def create(body: ResponsesBody, request: Request) -> Response:
    """The next response of a conversation."""
    state = state_of(request)
    state.asked(body.input)
    body.check_others()
    body.check()
    key = caller_of(request, None)
    messages = body.conversation(state.history.get(body.previous_response_id, key))
    asked = body.request_of(messages)
    with concerning(body.chat_param):
        ready = await asyncio.to_thread(prepared, state.tokenizer, asked, state.config.tool_parser)
    params = body.sampling(None, ready.grammar, state.adapter(body.model))
    if ready.keeps_special:
        params = dataclasses.replace(params, skip_special_tokens=False)

    def done(name: str, reply: Reply) -> None:
        if body.store is not False:
            state.history.add(name, key, [*messages, reply.message()])

    answer = ResponseAnswer(body.model or state.name, body, ready.reply(state.tokenizer), done)
    streams = state.llm.streams(
        {"prompt_token_ids": ready.token_ids},
        params,
        policy=body.policy(state.llm.llm.policy, state.most_tokens),
        caller=caller_of(request, body.user),
    )
    return await respond(answer, body, request, streams)


@dataclass
class ResponseAnswer:
    """One response. done: called with its id and the reply when it is complete."""

    model: str
    body: ResponsesBody
    reply: Reply
    done: Callable[[str, Reply], None]
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._writer = ItemWriter(self.reply)
        self._count = 0

    def take(self, index: int, piece: Piece) -> None:
        """Keeps a piece for `whole`."""
        self._writer.take(self.reply.add(piece))

    def whole(
        self, results: Sequence[Result], documents: _Documents | None = None
    ) -> dict[str, Any]:
        """The whole response."""
        status = _status(results[0])
        self._writer.close(status)
        self.done(self.id, self.reply)
        return self._shown(status, results)

    def begin(self) -> list[dict[str, Any]]:
        """The events before the first piece of a stream."""
        shown = self._shown("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [{"type": kind, "response": shown} for kind in kinds]

    def piece(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        """The events of a piece."""
        return self._writer.take(self.reply.add(piece))

    def closing(
        self, results: Sequence[Result], documents: _Documents | None, *, wants_usage: bool
    ) -> list[dict[str, Any]]:
        """The events after the last piece, always with the usage."""
        status = _status(results[0])
        closing = self._writer.close(status)
        self.done(self.id, self.reply)
        return [*closing, {"type": f"response.{status}", "response": self._shown(status, results)}]

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event that ends a stream with an error."""
        self._writer.close("incomplete")
        found = error.body["error"]
        shown = self._shown("failed")
        shown["error"] = {"code": found["code"] or found["type"], "message": found["message"]}
        return {"type": "response.failed", "response": shown}

    def frame(self, event: dict[str, Any]) -> bytes:
        """An event, with its number."""
        numbered = {**event, "sequence_number": self._count}
        self._count += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(numbered))

    @property
    def end(self) -> bytes:
        """Nothing: the type of the last event marks the end."""
        return b""

    def _shown(self, status: str, results: Sequence[Result] = ()) -> dict[str, Any]:
        body = self.body
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": [item.shown() for item in self._writer.items],
            "usage": self._usage(results) if results else None,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def _usage(self, results: Sequence[Result]) -> dict[str, Any]:
        found = usage(results)
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": found["prompt_tokens_details"],
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reply.reasoning_tokens},
            "total_tokens": found["total_tokens"],
            "keyhole": found["keyhole"],
        }


def _status(result: Result) -> str:
    return "incomplete" if result.finish_reason == "length" else "completed"


_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
#: Kind of an item -> the name of its text events.
_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


@dataclass
class OutputItem:
    """Reasoning, a message or a call. text: for a call, its arguments."""

    kind: str
    call_id: str = ""
    name: str = ""
    text: str = ""
    status: str = "in_progress"
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def shown(self) -> dict[str, Any]:
        """The item as clients receive it."""
        found: dict[str, Any] = {
            "id": f"{_IDS[self.kind]}_{self.id}",
            "type": self.kind,
            "status": self.status,
        }
        if self.kind == "function_call":
            return found | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        parts = [self.part()] if self.text or self.status != "in_progress" else []
        if self.kind == "reasoning":
            return found | {"summary": [], "content": parts}
        return found | {"role": "assistant", "content": parts}

    def part(self, text: str | None = None) -> dict[str, Any]:
        """Its only part; text: replaces its own."""
        shown = self.text if text is None else text
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": shown}
        return {"type": "output_text", "text": shown, "annotations": [], "logprobs": []}


class ItemWriter:
    """Creates items and events from the parts of a reply."""

    def __init__(self, reply: Reply) -> None:
        self.items: list[OutputItem] = []
        self._reply = reply

    def take(self, events: list[Event]) -> list[dict[str, Any]]:
        """The stream events of these parts."""
        sent: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, CallBegin):
                call_id = self._reply.calls[event.index].id
                sent += self._open(OutputItem("function_call", call_id, event.name))
            elif isinstance(event, CallArguments):
                sent += self._write(event.text)
            else:
                is_reasoning = isinstance(event, Reasoning)
                kind = "reasoning" if is_reasoning else "message"
                if not self.items or self.items[-1].kind != kind:
                    sent += self._open(OutputItem(kind))
                sent += self._write(event.text if isinstance(event, Reasoning) else event)
        return sent

    def close(self, status: str) -> list[dict[str, Any]]:
        """The end of the last item; status: "completed" or "incomplete"."""
        if not self.items or self.items[-1].status != "in_progress":
            return []
        item = self.items[-1]
        item.status = status
        sent: list[dict[str, Any]] = []
        if item.kind == "function_call":
            done: dict[str, Any] = {"arguments": item.text, "name": item.name}
        else:
            done = {"text": item.text, "content_index": 0}
        if item.kind == "message":
            done["logprobs"] = []
        sent.append(self._event(f"{_EVENTS[item.kind]}.done", **done))
        if item.kind != "function_call":
            sent.append(
                self._event("response.content_part.done", content_index=0, part=item.part())
            )
        return [*sent, self._of_item("response.output_item.done", item)]

    def _open(self, item: OutputItem) -> list[dict[str, Any]]:
        sent = self.close("completed")
        self.items.append(item)
        sent.append(self._of_item("response.output_item.added", item))
        if item.kind != "function_call":
            part = item.part("")
            sent.append(self._event("response.content_part.added", content_index=0, part=part))
        return sent

    def _write(self, text: str) -> list[dict[str, Any]]:
        item = self.items[-1]
        item.text += text
        more: dict[str, Any] = {} if item.kind == "function_call" else {"content_index": 0}
        if item.kind == "message":
            more["logprobs"] = []
        return [self._event(f"{_EVENTS[item.kind]}.delta", delta=text, **more)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = len(self.items) - 1
        named = {"item_id": self.items[place].shown()["id"], "output_index": place}
        return {"type": kind, **named, **fields}

    def _of_item(self, kind: str, item: OutputItem) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.items) - 1, "item": item.shown()}

"""The body of /v1/responses, as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from keyhole.server.bodies import SamplingBody
from keyhole.server.chat.grammars import answer_rule
from keyhole.server.chat.prompt import ChatRequest
from keyhole.server.errors import ApiError

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


class ResponsesBody(SamplingBody):
    """/v1/responses. input: a string, or items: messages, function calls and their outputs.

    previous_response_id: of a response of this server, whose conversation is continued. store:
    whether a later request may continue this one.
    """

    unsupported: ClassVar = {**SamplingBody.unsupported, **_UNSUPPORTED}

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    n: int | None = Field(1, ge=1, le=1)
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

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

    def chat_request(self, messages: Sequence[_Message]) -> ChatRequest:
        """The chat. The instructions precede the messages and are not stored with them."""
        first = [] if self.instructions is None else [_message("system", self.instructions)]
        return ChatRequest(
            messages=[*first, *messages],
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=self._format(),
            structured_outputs=self.structured_outputs,
            template_settings=self.chat_template_kwargs,
        )

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

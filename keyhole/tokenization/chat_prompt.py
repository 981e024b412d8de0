"""A conversation as the text that a model's chat template makes of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from keyhole.errors import RequestError

#: One message: "role", "content" (text, or a list of parts of text), and what templates know more.
Message = Mapping[str, Any]

#: What a model may call: a JSON schema as OpenAI has it, or a Python function with a docstring.
Tool = Mapping[str, Any] | Callable[..., Any]


def chat_text(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation, up to where the next message begins.

    settings: what else the template knows, such as {"enable_thinking": False}. RequestError for
    what is no conversation, for parts that are not text, and for what the template does not know:
    it would ignore it.
    """
    if isinstance(messages, str | Mapping) or not messages:
        what = "empty" if not messages else f"{type(messages).__name__}, not a list"
        raise RequestError(f"the conversation is {what}; give at least one message in a list")
    plain = [_plain(message) for message in messages]
    if tokenizer is None or not tokenizer.chat_template:
        raise RequestError("this model has no chat template; use generate with a prompt")
    template = str(tokenizer.get_chat_template(tools=tools))
    for name in [*(["tools"] if tools else []), *(settings or {})]:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise RequestError(f"this model's chat template knows no {name!r}; leave it out")
    try:
        text = tokenizer.apply_chat_template(
            plain,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=True,
            **(settings or {}),
        )
    except (TemplateError, TypeError, ValueError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RequestError(f"this model's chat template refuses it: {line}") from error
    return str(text)


def _plain(message: object) -> dict[str, Any]:
    """A message whose content is one text; one that calls tools may have none."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise RequestError(f"a message needs 'role' and 'content', not {message!r}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "\n".join(_text(part) for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError(
            f"a message needs a text, or a list of parts of text, as content; not {message!r}"
        )
    return {**message, "content": content}


def _text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f"a part of a message is of type {kind!r}, and models here read text alone: give "
            "{'type': 'text', 'text': ...}"
        )
    return str(part["text"])

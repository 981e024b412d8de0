"""Messages and tools as the tokens of a prompt, and the parsers of the reply."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from keyhole.errors import RequestError
from keyhole.server.chat.grammars import CallRules, answer_rule, constraint_of, grammar_of
from keyhole.server.chat.reply import Markers, ReasoningSplitter, Reply, markers_of
from keyhole.server.chat.tool_parser import (
    ToolCallParser,
    ToolFormat,
    XmlToolCallParser,
    named_format,
)
from keyhole.server.errors import ApiError
from keyhole.tokenization import chat_text, encode_text

#: A function that the model may call: "name", and optionally "description", "parameters", "strict".
_Function = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A chat request, with the names of OpenAI's interface."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    template_settings: Mapping[str, Any] | None = None

    @cached_property
    def functions(self) -> list[_Function]:
        """The functions that may be called. ApiError for a tool that is not a function."""
        return [] if self.tool_choice == "none" else [_function(tool) for tool in self.tools or ()]

    @cached_property
    def forced(self) -> list[_Function]:
        """The functions of which one must be called; empty: no call is required."""
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return []
        if not self.functions:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        if choice == "required":
            return self.functions
        found = choice.get("function", choice) if isinstance(choice, Mapping) else None
        name = found.get("name") if isinstance(found, Mapping) else None
        named = [one for one in self.functions if one["name"] == name]
        if not named:
            known = ", ".join(repr(one["name"]) for one in self.functions)
            raise ApiError(
                400,
                f"tool_choice {choice!r} must be 'none', 'auto', 'required' or name one of {known}",
                param="tool_choice",
            )
        return named


@dataclass(frozen=True, kw_only=True)
class PreparedChat:
    """A chat that is ready for the engine.

    grammar: that of the reply. keeps_special: special tokens are part of its text.
    functions: name -> schema of the parameters, of those that may be called.
    """

    token_ids: list[int]
    grammar: str | None
    keeps_special: bool
    functions: Mapping[str, Mapping[str, Any]]
    markers: Markers | None
    is_inside: bool
    tool_format: ToolFormat | None

    def reply(self, tokenizer: Any = None) -> Reply:
        """The parser of one completion. tokenizer: as in `Reply`."""
        splitter = None
        if self.markers is not None:
            splitter = ReasoningSplitter(self.markers, is_inside=self.is_inside)
        if self.tool_format is None or not self.functions:
            return Reply(splitter, tokenizer=tokenizer)
        if self.tool_format.is_xml:
            return Reply(splitter, XmlToolCallParser(self.functions), tokenizer)
        return Reply(splitter, ToolCallParser(self.tool_format, self.functions), tokenizer)


def prepared(tokenizer: Any, request: ChatRequest, tool_parser: str) -> PreparedChat:
    """The chat in the model's template. RequestError or ApiError for an invalid chat.

    tool_parser: the name of a format, or "auto".
    """
    functions, forced = request.functions, request.forced
    tools = [{"type": "function", "function": dict(one)} for one in functions] or None
    messages = [_with_parsed_calls(message) for message in request.messages]
    text = chat_text(tokenizer, messages, tools, request.template_settings)
    template = str(tokenizer.get_chat_template(tools=tools))
    markers, tool_format = markers_of(template), None
    if functions:
        tool_format = named_format(tool_parser, template)
        if tool_format is None:
            raise ApiError(
                400,
                "this model's chat template writes tool calls in an unknown format; start the "
                "server with --tool-parser, or leave tools out",
                param="tools",
            )
    inside = markers is not None and text.rstrip().endswith(markers.begin)
    special = _special_tokens(tokenizer, markers, tool_format)
    rule = constraint_of(request.structured_outputs)
    if rule is None:
        rule = answer_rule(request.response_format)
    if tool_format is not None and request.structured_outputs is None:
        rule = _rule_with_calls(request, forced, CallRules(tool_format, special), rule)
    if not text.strip():
        raise RequestError("the prompt is empty; give at least one word", field="prompt")
    return PreparedChat(
        token_ids=encode_text(tokenizer, text, special=False),
        grammar=None if rule is None else grammar_of(rule, markers, special, is_inside=inside),
        keeps_special=bool(special),
        functions={one["name"]: one.get("parameters") or {} for one in functions},
        markers=markers,
        is_inside=inside,
        tool_format=tool_format,
    )


def reply_to_question(tokenizer: Any, question: str) -> Reply:
    """The parser of the reply to a single message."""
    text = chat_text(tokenizer, [{"role": "user", "content": question}])
    markers = markers_of(str(tokenizer.get_chat_template()))
    if markers is None:
        return Reply()
    return Reply(ReasoningSplitter(markers, is_inside=text.rstrip().endswith(markers.begin)))


def _rule_with_calls(
    request: ChatRequest, forced: list[_Function], rules: CallRules, answer: str | None
) -> str | None:
    several = request.parallel_tool_calls
    if forced:
        return rules.calls(forced, several=several and request.tool_choice == "required")
    if answer is not None:
        return f"{answer} | {rules.calls(request.functions, several=several)}"
    if any(one.get("strict") for one in request.functions):
        return rules.free(request.functions, several=several)
    return None


def _function(tool: Mapping[str, Any]) -> _Function:
    """The function of a tool, as chats or responses write it."""
    found = tool.get("function", tool) if isinstance(tool, Mapping) else None
    good = isinstance(found, Mapping) and tool.get("type", "function") == "function"
    if not good or not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        raise ApiError(400, f"a tool must be a function with a name, not {tool!r}", param="tools")
    parameters = found.get("parameters")
    if parameters is not None and not _is_schema(parameters):
        raise ApiError(
            400,
            f"parameters of tool {found['name']!r} must be a JSON schema: an object, in which "
            "properties is an object and required a list",
            param="tools",
        )
    kept = ("name", "description", "parameters", "strict")
    return {name: found[name] for name in kept if found.get(name) is not None}


def _is_schema(parameters: Any) -> bool:
    """Whether it has the form of a schema, as far as formats of calls read it."""
    if not isinstance(parameters, Mapping):
        return False
    properties, required = parameters.get("properties"), parameters.get("required")
    return isinstance(properties or {}, Mapping) and isinstance(required or [], list)


def _with_parsed_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with the arguments of its calls as objects; clients send strings."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not calls:
        return message
    if not isinstance(calls, list):
        raise ApiError(400, "tool_calls must be a list", param="messages")
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{call!r} is not a function call", param="messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ApiError(
                400, f"arguments of a tool call are not JSON: {error}", param="messages"
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _special_tokens(
    tokenizer: Any, markers: Markers | None, tool_format: ToolFormat | None
) -> dict[str, int]:
    """The markers that are special tokens, which detokenised text omits by default."""
    named = [] if markers is None else [markers.begin, markers.end]
    if tool_format is not None:
        named += [tool_format.begin, tool_format.end, "[ARGS]"]
    special = set(tokenizer.all_special_tokens)
    return {name: tokenizer.convert_tokens_to_ids(name) for name in named if name in special}

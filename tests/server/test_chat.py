"""Tools, reasoning and structured output by OpenAI's own client.

The weights are random, so a grammar makes the model write what a trained one would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from keyhole import LLM
from tests.server import templates

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "looks", "parameters": SCHEMA}}
    for name in ("weather", "people")
]
SETTINGS: Any = {"model": "small", "messages": HELLO, "max_tokens": 250, "temperature": 1.0}
FORMS = {
    "hermes": templates.HERMES,
    "llama3": templates.LLAMA3,
    "mistral": templates.MISTRAL,
    "qwen3_coder": templates.QWEN3_CODER,
}


@pytest.fixture
def template(llm: LLM, own_engine: None) -> Iterator[Any]:
    """Sets the chat template of the served model for one test."""
    before = llm.tokenizer.chat_template

    def use(text: str) -> None:
        llm.tokenizer.chat_template = text

    yield use
    llm.tokenizer.chat_template = before


def whole_and_streamed(client: openai.OpenAI, **settings: Any) -> tuple[Any, dict[str, Any], str]:
    """A message, the same put together from a stream, and the finish reason of both."""
    settings = {**SETTINGS, "seed": 3, **settings}
    (choice,) = client.chat.completions.create(**settings).choices
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    reason = ""
    for chunk in client.chat.completions.create(**settings, stream=True):
        for one in chunk.choices:
            found["content"] += one.delta.content or ""
            found["reasoning_content"] += (one.delta.model_extra or {}).get("reasoning_content", "")
            for call in one.delta.tool_calls or []:
                if call.id:
                    found["calls"].append([call.function.name, ""])
                found["calls"][call.index][1] += call.function.arguments
            reason = one.finish_reason or reason
    assert choice.finish_reason == reason
    message = choice.message
    assert found["content"] == (message.content or "")
    assert found["calls"] == [
        [call.function.name, call.function.arguments] for call in message.tool_calls or []
    ]
    assert found["reasoning_content"] == (message.model_extra or {}).get("reasoning_content", "")
    return message, found, reason


def check_call(call: Any, name: str) -> None:
    assert (call.type, call.function.name) == ("function", name)
    said = json.loads(call.function.arguments)
    assert said["city"] in ("Oslo", "Lima")
    assert isinstance(said["warm"], bool)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", FORMS)
def test_a_tool_that_must_be_called_is_called(
    client: openai.OpenAI, template: Any, form: str
) -> None:
    template(FORMS[form])
    choice = {"type": "function", "function": {"name": "people"}}
    message, _, reason = whole_and_streamed(client, tools=TOOLS, tool_choice=choice)
    (call,) = message.tool_calls
    check_call(call, "people")
    assert message.content is None
    assert reason == "tool_calls"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", FORMS)
def test_one_of_several_tools_is_called_when_required(
    client: openai.OpenAI, template: Any, form: str
) -> None:
    template(FORMS[form])
    message, _, _ = whole_and_streamed(
        client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = message.tool_calls
    check_call(call, call.function.name)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '"so: <tool_call>{\\"name\\": \\"weather\\", \\"arguments\\": {}}</tool_call>"'),
        ("llama3", '"{\\"name\\": \\"weather\\", \\"parameters\\": {}}"'),
        (
            "qwen3_coder",
            '"<tool_call>\\n<function=weather>\\n</function>\\n</tool_call>"',
        ),
        ("mistral", '"[TOOL_CALLS][{\\"name\\": \\"weather\\", \\"arguments\\": {}}]"'),
    ],
)
def test_calls_that_the_model_makes_by_itself_are_found(
    client: openai.OpenAI, template: Any, form: str, text: str
) -> None:
    template(FORMS[form])
    forced = {"structured_outputs": {"grammar": f"start: {text}"}}
    message, _, reason = whole_and_streamed(client, tools=TOOLS, extra_body=forced)
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", "{}")
    assert message.content == ("so: " if form == "hermes" else None)
    assert reason == "tool_calls"


@pytest.mark.slow
def test_without_tools_nothing_is_a_call(client: openai.OpenAI, template: Any) -> None:
    template(templates.LLAMA3)
    forced = {"structured_outputs": {"grammar": 'start: "{\\"name\\": \\"f\\"}"'}}
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message, _, reason = whole_and_streamed(client, extra_body=forced, **more)
        assert (message.content, message.tool_calls, reason) == ('{"name": "f"}', None, "stop")


def test_a_strict_tool_binds_the_calls_of_a_free_answer(
    client: openai.OpenAI, llm: LLM, template: Any
) -> None:
    """Its text is free, and once it begins a call the schema holds."""
    template(templates.LLAMA3)
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    (brace,) = llm.tokenizer("{", add_special_tokens=False).input_ids
    made = client.chat.completions.create(
        **SETTINGS, tools=strict, logit_bias={str(brace): 30}, parallel_tool_calls=False, seed=1
    )
    (call,) = made.choices[0].message.tool_calls or []
    check_call(call, "weather")


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI, template: Any) -> None:
    template(templates.HERMES)
    call = {"name": "weather", "arguments": '{"city": "Oslo", "warm": true}'}
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "20 degrees"},
    ]
    settings: Any = {**SETTINGS, "messages": messages, "max_tokens": 4}
    made = client.chat.completions.create(**settings, tools=TOOLS)
    assert made.usage is not None
    text = json.dumps({"city": "Oslo", "warm": True})
    plain = client.chat.completions.create(**{**settings, "messages": HELLO}, tools=TOOLS)
    assert plain.usage is not None
    assert made.usage.prompt_tokens - plain.usage.prompt_tokens > len(text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice 'always' must be"),
        ({"tools": [{"type": "function"}]}, "a tool must be a function"),
        ({"tools": [{"type": "code_interpreter"}]}, "a tool must be a function"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type 'xml' must be"),
        ({"response_format": {"type": "json_schema"}}, "needs a 'schema'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "Invalid type: x",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "must have one of"),
        ({"structured_outputs": {"choice": []}}, "choice [] must be a list of at least one text"),
        ({"structured_outputs": {"regex": "("}}, "regex parse error: unclosed group"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "not valid"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_asked_is_an_error(
    client: openai.OpenAI, llm: LLM, template: Any, given: dict[str, Any], said: str, stream: bool
) -> None:
    template(templates.HERMES)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**SETTINGS, stream=stream, extra_body=given)
    assert said in error.value.body["message"]  # type: ignore[index]
    with llm.engine.lock:
        assert not llm.engine.has_work


@pytest.mark.parametrize("wrong", [{"properties": ["a"]}, {"required": 5}, ["a"]])
def test_parameters_that_are_no_schema_are_refused(
    client: openai.OpenAI, template: Any, wrong: Any
) -> None:
    """Of the format with elements, a list of properties was a failure of the server."""
    template(templates.QWEN3_CODER)
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": wrong}}
    with pytest.raises(openai.BadRequestError, match="'f' must be a JSON schema") as error:
        client.chat.completions.create(**SETTINGS, extra_body={"tools": [tool]})
    assert error.value.param == "tools"


def test_tools_that_the_template_does_not_know_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not use 'tools'"):
        client.chat.completions.create(**SETTINGS, tools=TOOLS)


# Structured output


@pytest.mark.slow
def test_an_answer_is_json_of_its_schema(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    message, _, reason = whole_and_streamed(client, response_format=wanted)
    said = json.loads(message.content)
    assert said["city"] in ("Oslo", "Lima")
    assert reason == "stop"


@pytest.mark.slow
def test_any_json_object_is_one(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_object"}
    for seed in range(20):
        made = client.chat.completions.create(**SETTINGS, response_format=wanted, seed=seed)
        (choice,) = made.choices
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)
            return
        assert (choice.message.content or "").lstrip().startswith("{")
    raise AssertionError("none of 20 objects came to an end")


@pytest.mark.slow
def test_the_client_parses_what_it_asked_for(client: openai.OpenAI) -> None:
    from pydantic import BaseModel

    class Town(BaseModel):
        warm: bool
        size: int

    for seed in range(10):
        try:
            made = client.chat.completions.parse(**SETTINGS, response_format=Town, seed=seed)
        except openai.LengthFinishReasonError:  # a number of a hundred digits
            continue
        assert isinstance(made.choices[0].message.parsed, Town)
        return
    raise AssertionError("none of 10 answers came to an end")


@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        ({"choice": ["left", "right"]}, {"left", "right"}),
        ({"regex": "a/[bc]"}, {"a/b", "a/c"}),
        ({"regex": r"a\\/[bc]"}, {r"a\/b", r"a\/c"}),
        ({"regex": "a\\\nb"}, {"a\nb"}),
        ({"grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"json": {"const": 7}}, {"7"}),
        ({"json": '{"const": 7}'}, {"7"}),
    ],
)
def test_structured_outputs_are_those_of_vllm(
    client: openai.OpenAI, constraint: dict[str, Any], allowed: set[str]
) -> None:
    body = {"structured_outputs": constraint}
    chat = client.chat.completions.create(**SETTINGS, extra_body=body)
    plain = client.completions.create(model="small", prompt="x", max_tokens=20, extra_body=body)
    assert {(chat.choices[0].message.content or "").strip(), plain.choices[0].text.strip()} <= (
        allowed
    )


# Reasoning


@pytest.mark.one_in(2)
@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_is_separate_from_the_answer(
    client: openai.OpenAI, template: Any, begun: bool
) -> None:
    template(templates.REASONING_BEGUN if begun else templates.REASONING)
    begin = "" if begun else '"<think>"'
    grammar = f'start: {begin} /[a-z]{{6}}/ "</think>\\n\\n" /[0-9]{{4}}/'
    message, _, reason = whole_and_streamed(
        client, extra_body={"structured_outputs": {"grammar": grammar}}
    )
    assert len(message.content) == 4
    assert message.content.isdigit()
    thoughts = message.model_extra["reasoning_content"]
    assert len(thoughts) == 6
    assert thoughts.isalpha()
    assert reason == "stop"


def test_an_answer_follows_its_schema_behind_reasoning(llm: LLM, template: Any) -> None:
    """The grammar of a reasoning model lets it think, and binds what comes after."""
    from keyhole.server.chat.prompt import ChatRequest, prepared

    for text, begin in ((templates.REASONING, "<think>"), (templates.REASONING_BEGUN, "")):
        template(text)
        wanted = {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}
        chat = prepared(llm.tokenizer, ChatRequest(messages=HELLO, response_format=wanted), "auto")
        assert chat.grammar is not None
        for said, is_allowed in (
            (f"{begin}a 7 b</think>\n\n7", True),
            (f"{begin}a</think>8", False),
        ):
            state = llm.engine.grammars.start(chat.grammar)
            tokens = llm.tokenizer(said, add_special_tokens=False).input_ids
            assert all(state.accept(token) for token in tokens) is is_allowed

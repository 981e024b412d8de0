"""/v1/responses, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from keyhole import LLM
from keyhole.server.state import History
from tests.server import templates
from tests.server.test_chat import SCHEMA

TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "looks", "parameters": SCHEMA}
]
#: As many tokens as the longest text of SCHEMA has, with all the whitespace that is allowed.
SETTINGS: Any = {"model": "small", "input": "hello", "temperature": 1.0, "max_output_tokens": 250}
REASONING = 'start: "<think>" /[a-z]{4}/ "</think>\\n\\n" /[0-9]{3}/'


@pytest.fixture
def reasoning(llm: LLM, own_engine: None) -> Iterator[None]:
    """A template that knows tools and reasoning."""
    before = llm.tokenizer.chat_template
    llm.tokenizer.chat_template = templates.REASONING
    yield
    llm.tokenizer.chat_template = before


def test_a_response_is_that_of_a_chat(client: openai.OpenAI) -> None:
    settings: Any = {"model": "small", "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    made = client.responses.create(input="hello", max_output_tokens=8, **settings)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(messages=messages, max_tokens=8, **settings)
    assert made.output_text == chat.choices[0].message.content
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    usage, wanted = made.usage, chat.usage
    assert usage is not None
    assert wanted is not None
    assert (usage.input_tokens, usage.output_tokens) == (wanted.prompt_tokens, 8)
    assert usage.model_extra is not None
    assert usage.model_extra["keyhole"]["attended_fraction"] == 1.0
    assert usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.slow
def test_the_client_puts_events_together(client: openai.OpenAI, reasoning: None) -> None:
    """Its stream helper keeps a snapshot by the events and compares nothing: we do."""
    body = {"structured_outputs": {"grammar": REASONING}}
    plain = client.responses.create(**SETTINGS, extra_body=body | {"seed": 4})
    kinds = []
    with client.responses.stream(**SETTINGS, extra_body=body | {"seed": 4}) as stream:
        numbers = []
        for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
        final = stream.get_final_response()
    assert numbers == sorted(set(numbers))
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output_text == plain.output_text
    assert final.output_text.isdigit()
    thoughts = final.output[0].content[0].text  # type: ignore[union-attr, index]
    assert thoughts == plain.output[0].content[0].text  # type: ignore[union-attr, index]
    assert thoughts.isalpha()
    assert final.usage is not None
    assert 0 < final.usage.output_tokens_details.reasoning_tokens < final.usage.output_tokens
    assert final.status == "completed"
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for wanted in ("reasoning_text", "output_text"):
        assert kinds.index(f"response.{wanted}.delta") < kinds.index(f"response.{wanted}.done")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_output_goes_back(
    client: openai.OpenAI, reasoning: None, stream: bool
) -> None:
    begin = '"<think>a</think>"'
    said = json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})
    call = json.dumps(f"<tool_call>{said}</tool_call>")
    body = {"structured_outputs": {"grammar": f"start: {begin} {call}"}}
    if stream:
        with client.responses.stream(**SETTINGS, tools=TOOLS, extra_body=body) as events:
            parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
            made: Any = events.get_final_response()
        assert "".join(parts) == '{"city": "Oslo"}'
    else:
        made = client.responses.create(**SETTINGS, tools=TOOLS, extra_body=body)
    assert [item.type for item in made.output] == ["reasoning", "function_call"]
    found = made.output[1]
    assert (found.name, json.loads(found.arguments)) == ("weather", {"city": "Oslo"})
    back: list[Any] = [
        {"type": "function_call_output", "call_id": found.call_id, "output": "20 degrees"}
    ]
    later = client.responses.create(
        model="small", input=back, previous_response_id=made.id, tools=TOOLS, max_output_tokens=4
    )
    whole: list[Any] = [{"role": "user", "content": "hello"}, *made.output[1:], *back]
    alone = client.responses.create(model="small", input=whole, tools=TOOLS, max_output_tokens=4)
    assert later.usage is not None
    assert alone.usage is not None
    # The history has the reasoning beside the call; this template shows calls alone.
    assert later.usage.input_tokens == alone.usage.input_tokens
    assert later.output_text == alone.output_text


@pytest.mark.usefixtures("own_engine")
def test_a_forced_function_and_a_schema_hold(client: openai.OpenAI, llm: LLM) -> None:
    before = llm.tokenizer.chat_template
    llm.tokenizer.chat_template = templates.HERMES
    try:
        choice: Any = {"type": "function", "name": "weather"}
        made: Any = client.responses.create(**SETTINGS, tools=TOOLS, tool_choice=choice)
    finally:
        llm.tokenizer.chat_template = before
    assert json.loads(made.output[0].arguments)["city"] in ("Oslo", "Lima")
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    made = client.responses.create(**SETTINGS, text=text)
    assert json.loads(made.output_text)["city"] in ("Oslo", "Lima")


def test_parts_instructions_and_roles_are_taken(client: openai.OpenAI) -> None:
    parts: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
        {"role": "user", "content": "again"},
    ]
    made = client.responses.create(
        model="small", input=parts, instructions="in verse", max_output_tokens=2
    )
    chat = client.chat.completions.create(
        model="small",
        messages=[
            {"role": "system", "content": "in verse"},
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "hi"},
            {"role": "user", "content": "again"},
        ],
        max_tokens=2,
    )
    assert made.usage is not None
    assert chat.usage is not None
    assert made.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({"input": []}, 400, "input is empty"),
        ({"input": [{"type": "image"}]}, 400, "type 'image' is not supported"),
        ({"input": [{"content": "a"}]}, 400, "role None of a message"),  # it was called "None"
        ({"input": [{"role": 5, "content": "a"}]}, 400, "role 5 of a message"),
        ({"truncation": "auto"}, 400, "truncation must be 'disabled'"),
        ({"previous_response_id": "resp_x"}, 404, "'resp_x' was not found"),
        ({"text": {"format": {"type": "xml"}}}, 400, "'xml' must be"),
        ({"model": "other"}, 404, "not served here"),
        (
            {"max_output_tokens": 0},
            400,
            "max_output_tokens: Input should be greater than or equal to 1, not 0",
        ),
        ({"n": 2}, 400, "n: "),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_an_error_object(
    address: str, given: dict[str, Any], status: int, said: str, stream: bool
) -> None:
    body = {"input": "hello", "stream": stream, "max_output_tokens": 4, **given}
    answer = httpx2.post(f"{address}/v1/responses", json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_what_is_not_stored_cannot_go_on(client: openai.OpenAI) -> None:
    made = client.responses.create(**SETTINGS | {"max_output_tokens": 2}, store=False)
    with pytest.raises(openai.NotFoundError, match="was not stored"):
        client.responses.create(**SETTINGS, previous_response_id=made.id)
    stored = client.responses.create(**SETTINGS | {"max_output_tokens": 2})
    other = openai.OpenAI(base_url=client.base_url, api_key="another", max_retries=0)
    with other, pytest.raises(openai.NotFoundError):
        other.responses.create(**SETTINGS, previous_response_id=stored.id)


def test_a_conversation_that_is_added_again_counts_once() -> None:
    """A replica on Ray learns a conversation again with every request that continues it."""
    history, half = History(), [{"role": "user", "content": "x" * 5_100_000}]
    for _ in range(3):
        history.add("resp_1", "key", half)
    assert history.get("resp_1", "key") == half

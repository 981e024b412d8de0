"""litellm against `keyhole serve`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.clients.conftest import ANSWER, CALL, FACT, SAID, SCHEMA, TOOL

litellm = pytest.importorskip("litellm", reason="`make test-clients` installs it")

HELLO = [{"role": "user", "content": "hello"}]


def ask(address: str, **settings: Any) -> Any:
    given = {"model": "openai/taught", "messages": HELLO, "temperature": 0.0, "max_tokens": 100}
    return litellm.completion(api_base=address, api_key="any", **given | settings)


def test_a_chat_has_its_answer_and_what_it_read(bundled: str) -> None:
    made = ask(bundled, model="openai/keyhole-tiny", messages=[FACT], max_tokens=3)
    assert made.choices[0].message.content.strip() == SAID
    usage = made.usage
    assert (usage.completion_tokens, usage.total_tokens) == (3, usage.prompt_tokens + 3)
    assert usage.keyhole["kv_bytes_read"] > 0
    again = ask(bundled, model="openai/keyhole-tiny", messages=[FACT], max_tokens=3)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_a_stream_ends_with_its_usage(bundled: str) -> None:
    settings: Any = {"model": "openai/keyhole-tiny", "messages": [FACT], "max_tokens": 4}
    whole = ask(bundled, **settings)
    pieces = [*ask(bundled, **settings, stream=True, stream_options={"include_usage": True})]
    said = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert said == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_request_may_read_all(bundled: str) -> None:
    made = ask(
        bundled,
        model="openai/keyhole-tiny",
        messages=[FACT],
        max_tokens=2,
        extra_body={"keyhole": "full"},
    )
    assert made.usage.keyhole["attended_fraction"] == 1.0


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_calls_a_tool_and_reads_its_answer(taught: str, stream: bool) -> None:
    made = ask(taught, tools=[TOOL], stream=stream)
    if stream:
        made = litellm.stream_chunk_builder([*made], messages=HELLO)
    (choice,) = made.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        json.loads(CALL)["arguments"],
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
    later = ask(taught, tools=[TOOL], messages=[*HELLO, choice.message, result])
    assert later.choices[0].message.content == ANSWER


def test_an_answer_is_json_of_its_schema(taught: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    made = ask(taught, response_format=form, temperature=1.0, seed=1)
    assert json.loads(made.choices[0].message.content)["city"] in ("Oslo", "Lima")


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_goes_on(bundled: str, stream: bool) -> None:
    made = litellm.text_completion(
        model="text-completion-openai/keyhole-tiny",
        prompt=FACT["content"],
        api_base=bundled,
        api_key="any",
        max_tokens=3,
        temperature=0.0,
        stream=stream,
    )
    pieces = made if stream else [made]
    assert "".join(piece.choices[0].text or "" for piece in pieces).strip() == SAID


def test_a_response_is_that_of_a_chat(bundled: str) -> None:
    made = litellm.responses(
        model="openai/keyhole-tiny",
        input=FACT["content"],
        api_base=bundled,
        api_key="any",
        max_output_tokens=3,
        temperature=0.0,
    )
    assert made.output[0].content[0].text.strip() == SAID
    assert made.usage.output_tokens == 3


def test_errors_are_those_of_the_client(bundled: str) -> None:
    with pytest.raises(litellm.BadRequestError, match=r"temperature -1\.0 must be at least 0"):
        ask(bundled, model="openai/keyhole-tiny", temperature=-1, max_retries=0)
    with pytest.raises(litellm.NotFoundError, match="'other' is not served here"):
        ask(bundled, model="openai/other", max_retries=0)
    with pytest.raises(litellm.NotFoundError, match="unknown path 'POST /v1/embeddings'"):
        litellm.embedding(
            model="openai/keyhole-tiny", input=["x"], api_base=bundled, api_key="any", max_retries=0
        )

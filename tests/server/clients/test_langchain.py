"""langchain-openai against `keyhole serve`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.clients.conftest import ANSWER, CALL, FACT, SAID, SCHEMA, TOOL

langchain_openai = pytest.importorskip("langchain_openai", reason="`make test-clients` installs it")


def chat(address: str, **settings: Any) -> Any:
    given = {"model": "taught", "temperature": 0.0, "max_tokens": 100, "max_retries": 0}
    return langchain_openai.ChatOpenAI(base_url=address, api_key="any", **given | settings)


def tiny(address: str, **settings: Any) -> Any:
    return chat(address, model="keyhole-tiny", max_tokens=3, **settings)


def test_a_chat_has_its_answer_and_what_it_read(bundled: str) -> None:
    said = tiny(bundled).invoke([FACT])
    assert said.content.strip() == SAID
    usage = said.usage_metadata
    assert (usage["output_tokens"], usage["total_tokens"]) == (3, usage["input_tokens"] + 3)
    assert said.response_metadata["token_usage"]["keyhole"]["kv_bytes_read"] > 0
    again = tiny(bundled).invoke([FACT]).usage_metadata
    assert again["input_token_details"]["cache_read"] > 0


def test_a_stream_ends_with_its_usage(bundled: str) -> None:
    model = chat(bundled, model="keyhole-tiny", max_tokens=4, stream_usage=True)
    whole, joined = model.invoke([FACT]), None
    for piece in model.stream([FACT]):
        joined = piece if joined is None else joined + piece
    assert joined.content == whole.content
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_a_batch_of_chats(bundled: str) -> None:
    assert [one.content.strip() for one in tiny(bundled).batch([[FACT]] * 8)] == [SAID] * 8


def test_a_request_may_read_all(bundled: str) -> None:
    body = {"keyhole": "full"}
    said = chat(bundled, model="keyhole-tiny", max_tokens=2, extra_body=body).invoke([FACT])
    assert said.response_metadata["token_usage"]["keyhole"]["attended_fraction"] == 1.0


def test_the_model_calls_a_tool_and_reads_its_answer(taught: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model, question = chat(taught).bind_tools([TOOL]), HumanMessage("hello")
    said, joined = model.invoke([question]), None
    for piece in model.stream([question]):
        joined = piece if joined is None else joined + piece
    for message in (said, joined):
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("weather", json.loads(CALL)["arguments"])
    result = ToolMessage("20 degrees", tool_call_id=said.tool_calls[0]["id"])
    assert model.invoke([question, said, result]).content == ANSWER


def test_a_forced_tool_fits_its_schema(taught: str) -> None:
    model = chat(taught, temperature=1.0, seed=1).bind_tools([TOOL], tool_choice="weather")
    (call,) = model.invoke("hello").tool_calls
    assert call["args"]["city"] in ("Oslo", "Lima")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_fits_its_schema(taught: str, method: str) -> None:
    schema = {"title": "city", "description": "a place", **SCHEMA}
    model = chat(taught, temperature=1.0, seed=1).with_structured_output(schema, method=method)
    assert model.invoke("hello")["city"] in ("Oslo", "Lima")


def test_a_text_goes_on(bundled: str) -> None:
    model = langchain_openai.OpenAI(
        base_url=bundled, api_key="any", model="keyhole-tiny", max_tokens=3, temperature=0.0
    )
    assert model.invoke(FACT["content"]).strip() == SAID
    assert "".join(model.stream(FACT["content"])).strip() == SAID


def test_the_interface_of_responses(bundled: str, taught: str) -> None:
    said = tiny(bundled, use_responses_api=True).invoke([FACT])
    assert said.text.strip() == SAID
    assert said.usage_metadata["output_tokens"] == 3
    model = chat(taught, use_responses_api=True).bind_tools([TOOL])
    (call,) = model.invoke("hello").tool_calls
    assert (call["name"], call["args"]) == ("weather", json.loads(CALL)["arguments"])


def test_there_are_no_embeddings(bundled: str) -> None:
    import openai

    model = langchain_openai.OpenAIEmbeddings(
        base_url=bundled,
        api_key="any",
        model="keyhole-tiny",
        check_embedding_ctx_length=False,  # it would count tokens as OpenAI's models do
        max_retries=0,
    )
    with pytest.raises(openai.NotFoundError, match="unknown path 'POST /v1/embeddings'"):
        model.embed_query("x")

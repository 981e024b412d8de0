"""Bodies that are wrong: an error object says so, the server lives, and nothing is a 500."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
import transformers
from packaging.version import Version
from pydantic import TypeAdapter, ValidationError

from keyhole import LLM, RequestError
from keyhole.server.bodies import ChatBody, CompletionBody
from tests.server.conftest import serving

JSON = {"content-type": "application/json"}
PLACES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
RAW = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"3",
    b'"text"',
    b"NaN",
    b"\xff\xfe",
    b'{"prompt": "\xc3("}',
    b'{"prompt": "\xed\xa0\x80"}',  # half a character in UTF-8
    b'{"prompt": "a" "b"}',
    b'{"prompt": ' + b"[" * 5000,
]
VALUES = [
    *(-1, 0, -(2**63), 2**63, 2**64, 10**30, -(10**30), 1e308, -1e308, 1e-320, 0.5),
    *("x", "", None, True, [], {}, [[]], [None], {"a": 1}, "\ud800"),
]
#: The least that a body has.
BEGIN: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "abc"},
    "chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "responses": {"input": "abc"},
}
FIELDS = (
    "max_tokens n temperature top_p top_k min_p seed logprobs presence_penalty frequency_penalty "
    "repetition_penalty logit_bias stop stop_token_ids ignore_eos stream stream_options keyhole "
    "model user prompt echo response_format"
).split()


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_json_or_no_text_is_refused(address: str, place: str) -> None:
    with httpx2.Client(base_url=address, headers=JSON) as client:
        for raw in RAW:
            answer = client.post(place, content=raw)
            assert answer.status_code == 400, (raw[:20], answer.text)
            assert answer.json()["error"]["type"] == "invalid_request_error", raw[:20]


def _is_served_or_told(answer: httpx2.Response) -> bool:
    if answer.status_code == 200:
        return True
    error = answer.json()["error"]
    return answer.status_code in (400, 404) and isinstance(error["message"], str)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("values", [VALUES[i::3] for i in range(3)], ids=range(3))
@pytest.mark.parametrize("field", FIELDS)
def test_no_number_and_no_type_is_a_failure_of_the_server(
    address: str, field: str, values: list[Any]
) -> None:
    with httpx2.Client(base_url=address, timeout=60, headers=JSON) as client:
        for value in values:
            body: dict[str, Any] = {"prompt": "abc", "max_tokens": 2, field: value}
            answer = client.post("/v1/completions", content=json.dumps(body))
            assert _is_served_or_told(answer), (field, value, answer.text)


@pytest.mark.parametrize(
    ("place", "field", "value", "said"),
    [
        ("completions", "prompt", 3, "prompt: must be text, token ids, or a list of either, not 3"),
        ("chat/completions", "max_tokens", 0, "max_tokens 0 must be"),
        ("chat/completions", "max_completion_tokens", 0, "max_completion_tokens: "),
        ("responses", "max_output_tokens", -1, "max_output_tokens: "),
        ("completions", "temperature", -1.5, "temperature -1.5 must be"),
        ("completions", "frequency_penalty", 1e308, "must be from -2 to 2"),
        ("completions", "stop", "", "stop ('',) must be"),
        ("completions", "n", 0, "n: Input should be greater than or equal to 1, not 0"),
        ("completions", "top_p", "wide", "not 'wide'"),
        ("completions", "keyhole", "qust", "unknown policy 'qust'"),
        ("chat/completions", "keyhole", {"token_budget": 0}, "not 0"),
        ("completions", "stop_token_ids", [3000], "stop_token_ids: token id 3000 is not"),
        ("chat/completions", "logit_bias", {"4000": 1}, "logit_bias: token id 4000 is not"),
    ],
)
def test_an_error_names_the_field_as_it_was_given_and_the_value(
    address: str, place: str, field: str, value: Any, said: str
) -> None:
    """`param` was null, or the field had the name that the engine has for it."""
    answer = httpx2.post(f"{address}/v1/{place}", json={**BEGIN[place], field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].partition(".")[0] == field
    assert said in error["message"]
    assert str(value if not isinstance(value, dict | list) else 0) in error["message"]


_BAD_SCHEMA = {"type": "nothing"}
_TOOL = {"name": "f", "parameters": _BAD_SCHEMA}


@pytest.mark.parametrize(
    ("place", "given", "param"),
    [
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": "\ud800"}, "prompt"),
        ("completions", {"prompt": [[5], []]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": "x" * 600}, "prompt"),
        ("completions", {"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ("chat/completions", {"chat_template_kwargs": {"deep": 1}}, "chat_template_kwargs"),
        ("chat/completions", {"tools": [{"type": "function", "function": _TOOL}]}, "tools"),
        ("chat/completions", {"documents": []}, "documents"),
        ("chat/completions", {"documents": ["nowhere"]}, "documents"),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": _BAD_SCHEMA}}},
            "response_format",
        ),
        ("responses", {"input": "x" * 600}, "input"),
        ("responses", {"input": [{"role": "user", "content": 5}]}, "input"),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "schema": _BAD_SCHEMA}}},
            "text.format",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_has_the_field_of_the_request(
    address: str, place: str, given: dict[str, Any], param: str, stream: bool
) -> None:
    """`param` was null."""
    body = json.dumps({**BEGIN[place], **given, "stream": stream})
    answer = httpx2.post(f"{address}/v1/{place}", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(("field", "value"), [("prompt", "\ud800"), ("messages", [])])
def test_what_cannot_be_tokenized_names_its_field(address: str, field: str, value: Any) -> None:
    answer = httpx2.post(f"{address}/tokenize", content=json.dumps({field: value}), headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_grammar_of_calls_that_is_wrong_is_that_of_the_tools() -> None:
    body = ChatBody(messages=[], tools=[{"function": _TOOL}], response_format={"type": "text"})
    assert body.param(RequestError("wrong", field="grammar")) == "tools"


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        ("completions", "max_tokens", True),
        ("completions", "n", True),
        ("completions", "temperature", False),
        ("completions", "stop_token_ids", [True]),
        ("completions", "logit_bias", {"5": True}),
        ("completions", "prompt", [True]),
        ("completions", "keyhole", {"token_budget": True}),
        ("chat/completions", "max_completion_tokens", True),
        ("responses", "max_output_tokens", True),
    ],
)
def test_true_is_no_number(address: str, place: str, field: str, value: Any) -> None:
    """It was taken for 1."""
    body = {**BEGIN[place], "max_tokens": 2, field: value}
    answer = httpx2.post(f"{address}/v1/{place}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].partition(".")[0] == field


def test_one_error_is_enough_for_a_prompt() -> None:
    """Every token of a prompt was an error of the forms that it did not have: seconds for a long
    prompt, in which no client got anything.
    """
    prompts = TypeAdapter(CompletionBody.model_fields["prompt"].annotation)
    with pytest.raises(ValidationError) as error:
        prompts.validate_python([0.5] * 100)
    assert error.value.error_count() == 4


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers 5.22 reads values that are nested so deeply",
)
def test_values_that_are_nested_too_deeply_are_refused(address: str) -> None:
    """They were status 500. How many levels Python itself reads depends on its version."""
    answers = []
    for levels in (900, 3000, 9000):
        deep = '{"a":' * levels + "1" + "}" * levels
        body = f'{{"messages": [{{"role": "user", "content": "a", "deep": {deep}}}]}}'
        answers.append(httpx2.post(f"{address}/v1/chat/completions", content=body, headers=JSON))
    assert all(answer.status_code in (200, 400) for answer in answers)
    assert any("nested too deeply" in answer.text for answer in answers)


def test_a_number_that_python_does_not_read_says_so(address: str) -> None:
    body = b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}"
    error = httpx2.post(f"{address}/v1/completions", content=body, headers=JSON).json()["error"]
    assert error["message"].startswith("the body is not JSON: Exceeds the limit (4300 digits)")


def test_reuse_without_documents_is_refused(address: str) -> None:
    """It was ignored, and so was a method that there is not."""
    for place, said in (
        ("chat/completions", "reuse 'sam_kv' needs documents"),
        ("completions", "reuse is not supported here; /v1/chat/completions takes it"),
        ("responses", "reuse is not supported here; /v1/chat/completions takes it"),
    ):
        answer = httpx2.post(f"{address}/v1/{place}", json={**BEGIN[place], "reuse": "sam_kv"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "reuse"
        assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("place", "field", "value", "said"),
    [
        ("completions", "prompt", "\ud800", "lone surrogate"),
        ("completions", "stop", ["a", "\ud800"], "lone surrogate"),
        ("completions", "bad_words", ["\ud800"], "lone surrogate"),
        (
            "chat/completions",
            "messages",
            [{"role": "user", "content": "\ud800"}],
            "lone surrogate",
        ),
        ("chat/completions", "documents", ["\ud800"], "unknown document"),
        ("responses", "input", "\ud800", "lone surrogate"),
        ("responses", "stop", "\ud800", "lone surrogate"),
        ("responses", "user", "\ud800", "user cannot be sent back"),
    ],
)
def test_half_of_a_character_is_refused(
    address: str, place: str, field: str, value: Any, said: str
) -> None:
    """As a `stop` it was accepted, and as a document's name or a `user` it was status 500."""
    body = json.dumps({**BEGIN[place], "max_tokens": 2, field: value})
    answer = httpx2.post(f"{address}/v1/{place}", content=body, headers=JSON)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["min_tokens", "ignore_eos"])
def test_a_setting_that_does_not_go_with_a_grammar_is_named(address: str, field: str) -> None:
    """`param` was null."""
    body = {"prompt": "abc", "max_tokens": 2, "response_format": {"type": "json_object"}, field: 1}
    answer = httpx2.post(f"{address}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("json", "text.format must be an object"),
        ({"type": "xml"}, "text.format.type 'xml' must be 'text', 'json_object' or 'json_schema'"),
        ({"type": "json_schema"}, "text.format needs a 'schema'"),
    ],
)
def test_a_format_of_a_response_is_named_as_it_was_given(
    address: str, given: Any, said: str
) -> None:
    """The field had its name of chats, response_format."""
    body = {"input": "abc", "text": {"format": given}}
    error = httpx2.post(f"{address}/v1/responses", json=body).json()["error"]
    assert (error["message"], error["param"]) == (said, "text.format")


def test_a_method_of_reuse_that_is_unknown_names_its_field(address: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "documents": ["a"], "reuse": "sam_kx"}
    error = httpx2.post(f"{address}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "reuse"
    assert "unknown reuse method 'sam_kx'" in error["message"]


@pytest.mark.parametrize(
    ("given", "field"),
    [("facts", "documents"), ({"search": {"quer": "x"}}, "documents.search.quer")],
)
def test_documents_of_a_wrong_form_are_named_as_given(address: str, given: Any, field: str) -> None:
    """The field had the name of its form, `documents.names`, which no request has."""
    body = {"messages": [{"role": "user", "content": "a"}], "documents": given}
    error = httpx2.post(f"{address}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")


def test_errors_about_stored_documents_name_the_field(address: str) -> None:
    """`param` was `query.top_k`, which no request has, and null."""
    place = f"{address}/v1/documents"
    found = httpx2.get(place, params={"query": "a", "top_k": 0})
    assert found.json()["error"]["param"] == "top_k"
    stored = httpx2.put(f"{place}/a", json={"text": "a", "metadata": {"a": "x" * 5000}})
    assert stored.json()["error"]["param"] == "metadata"


def test_json_that_is_not_said_to_be_json_is_told(address: str) -> None:
    """As `curl -d` sends it; the error said that it was no JSON object."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = httpx2.post(f"{address}/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 400
    assert "with Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        ("completions", "use_beam_search", True),
        ("completions", "guided_json", {}),
        ("completions", "top_logprobs", 2),
        ("chat/completions", "continue_final_message", True),
        ("chat/completions", "guided_regex", "a+"),
        ("responses", "conversation", "conv_1"),
        ("responses", "background", True),
        ("responses", "include", ["message.output_text.logprobs"]),
        ("responses", "prompt", {"id": "pmpt_1"}),
        ("responses", "top_logprobs", 2),
    ],
)
def test_what_would_change_an_answer_is_not_ignored(
    address: str, place: str, field: str, value: Any
) -> None:
    answer = httpx2.post(f"{address}/v1/{place}", json={**BEGIN[place], field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert f"{field} is not supported here" in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", [None, [], ["reasoning.encrypted_content"]])
def test_a_response_may_include_what_changes_nothing(address: str, value: Any) -> None:
    body = {"input": "abc", "max_output_tokens": 2, "include": value, "prompt": None}
    assert httpx2.post(f"{address}/v1/responses", json=body).status_code == 200


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tokenize"])
def test_a_setting_of_a_template_is_nothing_else(address: str, name: str) -> None:
    """The error named functions of Python."""
    body = {
        "messages": [{"role": "user", "content": "abc"}],
        "chat_template_kwargs": {name: False},
    }
    error = httpx2.post(f"{address}/v1/chat/completions", json=body).json()["error"]
    assert error["message"] == f"{name!r} cannot be given to a chat template; leave it out"


@pytest.mark.parametrize("place", BEGIN)
def test_null_is_as_if_a_field_were_absent(address: str, place: str) -> None:
    """As in OpenAI's API; it was refused."""
    nulls = dict.fromkeys(("n", "stream", "stream_options", "logprobs", "parallel_tool_calls"))
    body: dict[str, Any] = {**BEGIN[place], "max_tokens": 2, **nulls}
    assert httpx2.post(f"{address}/v1/{place}", json=body).status_code == 200
    body |= {"stream": True, "stream_options": {"include_usage": None}}
    answer = httpx2.post(f"{address}/v1/{place}", json=body)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n") or place == "responses"


@pytest.mark.parametrize(
    "prompt", [[-1], [2**31], [2**70], [[]], [[1], "a"], ["a", 1], [1.5], [[1, -2]], ["\x00"]]
)
def test_prompts_of_wrong_tokens_are_errors(address: str, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 2}
    assert _is_served_or_told(httpx2.post(f"{address}/v1/completions", json=body))


@pytest.mark.parametrize("value", [float("nan"), "\ud800"])
@pytest.mark.parametrize("field", ["metadata", "reasoning", "text"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_not_begun_that_could_not_be_sent(
    address: str, stream: bool, field: str, value: Any
) -> None:
    """The fields are sent back: after the whole generation, that was status 500."""
    body = {"input": "abc", "max_output_tokens": 2, "stream": stream, field: {"any": value}}
    answer = httpx2.post(f"{address}/v1/responses", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("place", "field", "part"),
    [
        ("chat/completions", "messages", {"type": "image_url", "image_url": {"url": "data:,"}}),
        ("responses", "input", {"type": "input_image", "image_url": "data:,"}),
    ],
)
def test_a_message_with_an_image_is_refused_by_name(
    address: str, place: str, field: str, part: dict[str, Any]
) -> None:
    content = [{"type": "text", "text": "What is it?"}, part]
    body = {field: [{"role": "user", "content": content}], "max_tokens": 2}
    answer = httpx2.post(f"{address}/v1/{place}", json=body)
    assert answer.status_code == 400
    assert f"of type {part['type']!r}" in answer.json()["error"]["message"]


def test_the_server_lives_after_all_that(address: str) -> None:
    answer = httpx2.post(f"{address}/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    assert answer.status_code == 200


@pytest.mark.slow
def test_a_body_of_ten_megabytes_is_too_long_and_one_more_is_too_large(llm: LLM) -> None:
    """Of the default limit; a smaller one is tested beside other limits."""
    with serving(llm) as address:
        for place in ("/v1/completions", "/tokenize"):
            large = b'{"prompt": "' + b"x" * (11 * 2**20) + b'"}'
            answer = httpx2.post(address + place, content=large, headers=JSON, timeout=60)
            assert answer.status_code == 413
        long = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
        place = f"{address}/v1/completions"
        answer = httpx2.post(place, content=long, headers=JSON, timeout=120)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        answer = httpx2.post(place, json={"prompt": "abc", "max_tokens": 2})
        assert answer.status_code == 200

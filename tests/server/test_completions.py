"""/v1/chat/completions and /v1/completions, by OpenAI's own client."""

from __future__ import annotations

import json
import math
import socket
import time
from typing import Any

import httpx2
import openai
import pytest

from keyhole import LLM, SamplingParams
from keyhole.server.answers import Answer, TextOffsets
from tests.checkpoints import EOS

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}


def wanted(llm: LLM, tokens: int = 8) -> Any:
    return llm.chat(HELLO, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))


def test_the_model_is_listed(client: openai.OpenAI, llm: LLM) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("small", "keyhole")
    assert model.model_extra["max_model_len"] == llm.engine.max_length
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


def test_a_chat_equals_the_engines_answer(client: openai.OpenAI, llm: LLM) -> None:
    made = client.chat.completions.create(model="small", messages=HELLO, max_tokens=8, **GREEDY)
    expected = wanted(llm)
    (choice,) = made.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == "length"
    usage = made.usage
    assert usage.prompt_tokens == len(expected.prompt_token_ids)
    assert (usage.completion_tokens, usage.total_tokens) == (8, usage.prompt_tokens + 8)
    counted = usage.model_extra["keyhole"]
    assert counted["attended_fraction"] == 1.0
    assert counted["kv_bytes_read"] == expected.stats.kv_bytes_read


def test_pieces_of_a_stream_make_the_answer(client: openai.OpenAI, llm: LLM) -> None:
    pieces = [
        *client.chat.completions.create(
            model="small",
            messages=HELLO,
            max_completion_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    ]
    *said, last = pieces
    assert "".join(piece.choices[0].delta.content or "" for piece in said) == wanted(llm).text
    assert [piece.choices[0].delta.role for piece in said][:2] == ["assistant", None]
    assert [piece.choices[0].finish_reason for piece in said[-2:]] == [None, "length"]
    assert len({piece.id for piece in pieces}) == 1
    assert not last.choices
    assert last.usage.completion_tokens == 8


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_several_completions_each(
    client: openai.OpenAI, llm: LLM, stream: bool
) -> None:
    prompts, found = ["one", "two"], {}
    made = client.completions.create(
        model="small", prompt=prompts, n=2, seed=5, max_tokens=6, temperature=1.0, stream=stream
    )
    for piece in made if stream else [made]:
        for choice in piece.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    for index in range(4):
        params = SamplingParams(max_tokens=6, temperature=1.0, seed=5 + index % 2)
        assert found[index] == llm.generate(prompts[index // 2], params).text


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8, 9]]])
def test_a_prompt_may_be_token_ids(client: openai.OpenAI, llm: LLM, prompt: Any) -> None:
    made = client.completions.create(model="small", prompt=prompt, max_tokens=4, **GREEDY)
    given = prompt if isinstance(prompt[0], list) else [prompt]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for choice, ids in zip(made.choices, given, strict=True):
        assert choice.text == llm.generate({"prompt_token_ids": ids}, params).text


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_engine(
    client: openai.OpenAI, llm: LLM, stream: bool
) -> None:
    made = client.chat.completions.create(
        model="small",
        messages=HELLO,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
        stream=stream,
        **GREEDY,
    )
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=3)
    expected = llm.chat(HELLO, params)
    pieces: Any = made if stream else [made]
    said = [token for piece in pieces for token in piece.choices[0].logprobs.content]
    assert len(said) == 4
    for token, ids, best in zip(said, expected.token_ids, expected.logprobs or [], strict=True):
        assert token.logprob == pytest.approx(best[ids], abs=1e-5)
        found = [one.logprob for one in token.top_logprobs]
        assert found == pytest.approx([*best.values()], abs=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_completion_have_their_place_in_the_text(
    client: openai.OpenAI, llm: LLM, stream: bool
) -> None:
    """`text_offset` was missing; "é" is two tokens."""
    tokens = llm.tokenizer("aé<b", add_special_tokens=False).input_ids
    rule = {"grammar": 'start: "aé<b"'}
    made = client.completions.create(
        model="small",
        prompt=["x", "y"],
        max_tokens=8,
        logprobs=0,
        stream=stream,
        extra_body={"structured_outputs": rule},
    )
    found: dict[int, list[int]] = {0: [], 1: []}
    for piece in made if stream else [made]:
        for choice in piece.choices:
            if choice.logprobs:
                found[choice.index] += choice.logprobs.text_offset
    assert len(tokens) == 5
    assert found[0] == found[1] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("hidden", [True, False])
def test_a_special_token_takes_place_where_it_is_shown(client: openai.OpenAI, hidden: bool) -> None:
    made = client.completions.create(
        model="small",
        prompt="x",
        max_tokens=2,
        logprobs=0,
        logit_bias={str(EOS): 100},
        extra_body={"ignore_eos": True, "skip_special_tokens": hidden},
    )
    (choice,) = made.choices
    assert (choice.text == "") is hidden
    assert choice.logprobs.text_offset == [0, len(choice.text) // 2]


@pytest.mark.parametrize("most", [None, 0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_exactly_the_most_likely_tokens_are_listed(
    client: openai.OpenAI, llm: LLM, most: int | None, stream: bool
) -> None:
    """The chosen token was listed as one more where it was not among them."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=8)
    (best,) = llm.chat(HELLO, params).logprobs or []
    *likely, chosen = best.items()
    made = client.chat.completions.create(
        model="small",
        messages=HELLO,
        max_tokens=1,
        logprobs=True,
        logit_bias={str(chosen[0]): 100},
        stream=stream,
        **({} if most is None else {"top_logprobs": most}),
        **GREEDY,
    )
    pieces: Any = made if stream else [made]
    (token,) = [one for piece in pieces for one in piece.choices[0].logprobs.content]
    # Another step of other requests may round them in another way.
    assert token.logprob == pytest.approx(chosen[1], abs=1e-5)
    found = [one.logprob for one in token.top_logprobs]
    assert found == pytest.approx([value for _, value in likely[: most or 0]], abs=1e-5)


def test_a_part_of_a_character_has_its_own_bytes(client: openai.OpenAI, llm: LLM) -> None:
    """Tokens of a split "é" had the bytes of the replacement character."""
    parts = llm.tokenizer.convert_tokens_to_ids(["Ã", "©"])  # 0xc3 and 0xa9, as byte-level letters
    for part, byte in zip(parts, "é".encode(), strict=True):
        made = client.chat.completions.create(
            model="small",
            messages=HELLO,
            max_tokens=1,
            logprobs=True,
            logit_bias={str(part): 100},
        )
        (token,) = made.choices[0].logprobs.content
        assert token.bytes == [byte]


def test_stop_ends_before_its_text(client: openai.OpenAI, llm: LLM) -> None:
    text = wanted(llm, 8).text
    made = client.chat.completions.create(
        model="small", messages=HELLO, max_tokens=8, stop=[text[-1]], **GREEDY
    )
    assert made.choices[0].message.content == text[: text.index(text[-1])]
    assert made.choices[0].finish_reason == "stop"


WRONG = [
    ({"messages": 3}, 400, "messages"),
    ({"messages": []}, 400, "at least one message"),
    ({"messages": [{"role": "user"}]}, 400, "as its 'content'"),
    ({"temperature": -1}, 400, "temperature -1.0 must be at least 0"),
    ({"max_tokens": 0}, 400, "max_tokens 0"),
    ({"n": 0}, 400, "n: "),
    ({"n": 1000}, 400, "1000 completions"),
    ({"n": 10**30}, 400, "n: "),
    ({"model": "other"}, 404, "'other' is not served here"),
    ({"top_logprobs": 3}, 400, "needs logprobs"),
    ({"functions": [{"name": "f"}]}, 400, "functions is not supported"),
    ({"stop": 5}, 400, "stop: "),
    ({"n": 10000}, 400, "10000 completions"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "tokens"),
    ({"documents": ["nowhere"]}, 400, "nowhere"),
]


@pytest.mark.parametrize(
    ("given", "status", "said"), WRONG, ids=[str(n) for n in range(len(WRONG))]
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_an_error_object(
    address: str, given: dict[str, Any], status: int, said: str, stream: bool
) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "stream": stream, **given}
    answer = httpx2.post(f"{address}/v1/chat/completions", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert said in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body"), [("completions", {"prompt": "x"}), ("responses", {"input": "x"})]
)
def test_only_chats_have_documents(address: str, path: str, body: dict[str, Any]) -> None:
    """They were ignored, and the answer was given without them."""
    answer = httpx2.post(f"{address}/v1/{path}", json={**body, "documents": ["handbook"]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "documents is not supported here; /v1/chat/completions takes it" in error["message"]


@pytest.mark.parametrize("path", ["POST /v1/completions", "PUT /v1/documents/x"])
@pytest.mark.parametrize(
    ("raw", "said"),
    [(b"{", "the body is not JSON: "), (b"[]", "the body must be a JSON object")],
)
def test_a_wrong_body_is_named(address: str, path: str, raw: bytes, said: str) -> None:
    """The message was "1: JSON decode error", or began with a colon."""
    method, _, place = path.partition(" ")
    headers = {"content-type": "application/json"}
    answer = httpx2.request(method, address + place, content=raw, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)
    assert answer.json()["error"]["param"] is None


@pytest.mark.parametrize("raw", [b"{", b"\xff\xfe", b"[]", b'{"messages": NaN}', b""])
def test_a_body_that_is_no_json_is_refused(address: str, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx2.post(f"{address}/v1/chat/completions", content=raw, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.usefixtures("own_engine")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(address: str, llm: LLM, stream: bool) -> None:
    body = json.dumps(
        {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": stream}
    ).encode()
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        )
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        until(lambda: llm.engine.has_work)
    until(lambda: not llm.engine.has_work)
    with llm.engine.lock:
        llm.engine.check_integrity()


def until(reached: Any) -> None:
    end = time.monotonic() + 120  # far more than it takes, also on a busy machine
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_token_that_cannot_occur_has_the_lowest_logprob_of_the_api() -> None:
    answer = Answer("chat.completion", "tiny", top_logprobs=2)
    found = answer._logprobs(0, [3], [{3: -0.5, 4: -math.inf}])
    assert '"logprob": -9999.0' in json.dumps(found, allow_nan=False)


def test_of_tokens_with_the_same_text_the_likeliest_is_listed(llm: LLM) -> None:
    """The last one was, so that a token that is no maximum could look like one, or the reverse."""
    likely, unlikely = llm.tokens("é")[1:]
    other = llm.tokens("x")[1]
    offsets = [TextOffsets(llm.tokenizer, skip_special=True)]
    answer = Answer("text_completion", "small", llm.tokenizer, offsets=offsets)
    found = answer._logprobs(0, [unlikely], [{likely: -0.5, other: -1.0, unlikely: -7.0}])
    assert found is not None
    assert found["token_logprobs"] == [-7.0]
    assert found["top_logprobs"] == [{"\ufffd": -0.5, "x": -1.0}]

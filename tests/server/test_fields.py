"""Fields of a request one by one, over HTTP: what each does to the answer."""

from __future__ import annotations

import logging
from typing import Any

import httpx2
import openai
import pytest

from keyhole import LLM, SamplingParams
from keyhole.server.chat.grammars import CallRules, grammar_of
from keyhole.server.chat.tool_parser import QWEN3_CODER
from tests.checkpoints import EOS

LONG = "a prompt of several pages, which the second request finds in the prefix cache " * 2
PARAMS: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def complete(address: str, **given: Any) -> dict[str, Any]:
    answer = httpx2.post(f"{address}/v1/completions", json={**PARAMS, **given})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def counters(address: str, *names: str) -> list[float]:
    lines = httpx2.get(f"{address}/metrics").text.splitlines()
    values = dict(line.split() for line in lines if not line.startswith("#") and "{" not in line)
    return [float(values[f"keyhole_{name}_total"]) for name in names]


#: A field, and that of SamplingParams which gives the same where its name is another.
SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.7, "seed": 4}, {}),
    ({"temperature": 1.0, "seed": 4, "top_p": 0.3}, {}),
    ({"temperature": 1.0, "seed": 4, "top_k": 2}, {}),
    ({"temperature": 1.0, "seed": 4, "top_k": -1}, {"top_k": 0}),
    ({"temperature": 1.0, "seed": 4, "min_p": 0.4}, {}),
    ({"presence_penalty": 2.0}, {}),
    ({"frequency_penalty": 2.0}, {}),
    ({"repetition_penalty": 5.0}, {}),
    ({"logit_bias": {"100": 100}}, {"logit_bias": {100: 100.0}}),
    ({"bad_words": ["e", "a"]}, {}),
    ({"stop_token_ids": [100], "logit_bias": {"100": 100}}, {"logit_bias": {100: 100.0}}),
    (
        {"stop_token_ids": [100], "logit_bias": {"100": 100}, "min_tokens": 3},
        {"logit_bias": {100: 100.0}},
    ),
]


@pytest.mark.parametrize(("given", "named"), SAMPLING, ids=",".join)
def test_a_field_of_sampling_is_the_engines(
    address: str, llm: LLM, given: dict[str, Any], named: dict[str, Any]
) -> None:
    expected = llm.generate(LONG, SamplingParams(**{**PARAMS, **given, **named}))
    (choice,) = complete(address, prompt=LONG, **given)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)


def test_seeds_are_all_whole_numbers(address: str) -> None:
    """A negative one, which OpenAI's API allows, was refused."""
    asked = {"prompt": "x", "temperature": 1.0, "max_tokens": 12}
    texts = [
        [complete(address, **asked, seed=seed)["choices"][0]["text"] for _ in range(2)]
        for seed in (-1, -2, -(2**63), 2**64 - 1, 10**30)
    ]
    assert all(first == again for first, again in texts)
    assert len({first for first, _ in texts}) == 4  # -1 is the last of 64 bits


def test_a_biased_token_is_chosen_and_banned_ones_are_not(address: str, llm: LLM) -> None:
    (letter,) = llm.tokenizer("q", add_special_tokens=False).input_ids
    others = {str(token): -100 for token in range(llm.engine.model.vocab_size) if token != letter}
    for bias in ({str(letter): 100}, others):
        made = complete(address, prompt="x", temperature=1.0, seed=1, logit_bias=bias)
        assert made["choices"][0]["text"] == "qqqqqq"


def test_the_end_of_a_text_may_be_ignored(address: str) -> None:
    bias = {str(EOS): 100}
    ended = complete(address, prompt="x", logit_bias=bias, ignore_eos=False)
    assert ended["choices"][0] | {"text": ""} == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert ended["usage"]["completion_tokens"] == 1
    ignored = complete(address, prompt="x", logit_bias=bias)
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["usage"]["completion_tokens"] == 6


def test_without_a_limit_an_answer_fills_the_context(address: str, llm: LLM) -> None:
    prompt = [5] * (llm.engine.max_length - 7)
    made = complete(address, prompt=prompt, max_tokens=None)
    assert made["usage"]["completion_tokens"] == 7
    assert made["choices"][0]["finish_reason"] == "length"


def test_tokens_that_were_cached_are_said(client: openai.OpenAI) -> None:
    prompt = "each test has a text of its own, so that nothing of it is cached before it " * 2
    settings: Any = {"model": "small", "temperature": 0.0}
    messages: Any = [{"role": "user", "content": prompt}]
    found = []
    for _ in range(2):
        made = client.chat.completions.create(**settings, messages=messages, max_tokens=2)
        found.append(made.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]
    assert found[0] == 0
    assert found[1] == pytest.approx(made.usage.prompt_tokens, abs=16)  # type: ignore[union-attr]
    response = client.responses.create(**settings, input=prompt, max_output_tokens=2)
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == found[1]


def test_completions_of_a_prompt_share_its_computation(address: str) -> None:
    names = ("prompt_tokens", "cached_prompt_tokens")
    before = counters(address, *names)
    prompt = "nobody has asked this before, and four completions want it at the same time " * 2
    made = complete(address, prompt=prompt, n=4, temperature=1.0, seed=1)
    asked, cached = (b - a for a, b in zip(before, counters(address, *names), strict=True))
    length = made["usage"]["prompt_tokens"]
    assert (len(made["choices"]), asked) == (4, 4 * length)
    # All but the last page of the prompt, which each computes again for its own logits.
    assert 3 * (length - 16) <= cached < 3 * length
    assert made["usage"]["total_tokens"] == length + 4 * 6


def test_prompts_that_are_equal_are_counted_each(address: str) -> None:
    one = complete(address, prompt="equal")["usage"]["prompt_tokens"]
    assert complete(address, prompt=["equal", "equal"])["usage"]["prompt_tokens"] == 2 * one


KEYS = {
    "attended_fraction",
    "kv_bytes_read",
    "offloaded_layers",
    "sequence_ratio",
    "held_ratio",
    "recompute_ratio",
}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_says_what_it_read(client: openai.OpenAI, path: str, stream: bool) -> None:
    hello: Any = [{"role": "user", "content": "hello"}]
    settings: Any = {"model": "small", "stream": stream, "temperature": 0.0}
    if path == "responses":
        made: Any = client.responses.create(input=hello, max_output_tokens=4, **settings)
        usage = ([*made][-1].response if stream else made).usage
    else:
        if stream:
            settings["stream_options"] = {"include_usage": True}
        made = (
            client.chat.completions.create(messages=hello, max_tokens=4, **settings)
            if path == "chat/completions"
            else client.completions.create(prompt="hello", max_tokens=4, **settings)
        )
        usage = ([*made][-1] if stream else made).usage
    said = usage.model_extra["keyhole"]
    assert said.keys() >= KEYS
    assert said["attended_fraction"] == 1.0
    assert said["kv_bytes_read"] > 0
    assert said["sequence_ratio"] is said["recompute_ratio"] is None


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/completions", {"prompt": "x"}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("v1/responses", {"input": "x"}),
        ("tokenize", {"prompt": "x"}),
        ("detokenize", {"tokens": [5]}),
    ],
)
def test_an_unknown_field_is_ignored_and_logged_once(
    address: str, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    name = f"sparkle_{path}"
    given = {**body, "max_tokens": 2, name: 3}
    with caplog.at_level(logging.WARNING, "keyhole.server"):
        for _ in range(3):
            answer = httpx2.post(f"{address}/{path}", json=given)
            assert answer.status_code == 200
    said = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert said == [f"unknown request field '{name}' is ignored"]


def test_messages_are_tokenized_as_a_chat(address: str, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    found = httpx2.post(f"{address}/tokenize", json={"messages": messages}).json()
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    for wrong in ({}, {"prompt": "x", "messages": messages}):
        answer = httpx2.post(f"{address}/tokenize", json=wrong)
        assert answer.status_code == 400
        assert "prompt or messages" in answer.json()["error"]["message"]


XML_PARAMETERS: dict[str, Any] = {
    "properties": {
        "code": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Number"}}, {"type": "null"}]},
        "c": {"$ref": "#/$defs/Color"},
    },
    "required": ["code"],
    "$defs": {
        "Number": {"type": "integer"},
        "Color": {"enum": ["red", "blue"], "type": "string"},
    },
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("<parameter=code>\nif a < b:\n  c\n</parameter>\n<parameter=n>\n-3\n</parameter>\n", True),
        ("<parameter=code>\n\n</parameter>\n", True),
        ("<parameter=n>\n3\n</parameter>\n", False),  # `code` is required
        ("<parameter=code>\nx\n</parameter>\n<parameter=n>\nx\n</parameter>\n", False),
        ("<parameter=code>\nx\n</parameter>\n<parameter=o>\n[3]\n</parameter>\n", True),
        ("<parameter=code>\nx\n</parameter>\n<parameter=o>\nnull\n</parameter>\n", True),
        ("<parameter=code>\nx\n</parameter>\n<parameter=o>\nx\n</parameter>\n", False),
        ("<parameter=code>\nx\n</parameter>\n<parameter=c>\nred\n</parameter>\n", True),
        ("<parameter=code>\nx\n</parameter>\n<parameter=c>\ngreen\n</parameter>\n", False),
    ],
)
def test_a_forced_call_of_elements_fits_its_schema(llm: LLM, text: str, fits: bool) -> None:
    assert_call(llm, XML_PARAMETERS, text, fits)


XML_TEXTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"const": "a b"}, ["a b"], ["a", "x"]),
    ({"type": "string", "maxLength": 3}, ["", "äöü", "a\nb"], ["abcd"]),
    ({"type": "string", "minLength": 2}, ["ab", "</parameter>"], ["", "a"]),
    (
        {"type": "string", "pattern": "^[a-z]+$|^0/|\\\\|9$"},
        ["ab", "0/x", "1\\2", "89"],
        ["1", "A"],
    ),
    ({"type": "string", "pattern": "[0-9]", "maxLength": 2}, ["a1", "1"], ["ab", "a12"]),
    ({"type": "string", "pattern": r"^\d[\d\-|\]]*$"}, ["1-2", "1|]"], ["٣", "1٣", "1\\"]),
    ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, ["a", "b"], ["c", "null"]),
    ({"anyOf": [{"enum": ["one"]}, {"pattern": "^[0-9]$"}]}, ["one", "1"], ["two"]),
    ({"allOf": [{"$ref": "#/$defs/Short"}], "description": "a code"}, ["xy"], ["xyz"]),
    ({"$ref": "#/properties/p/items"}, ["3"], ["x"]),
    ({"type": "array", "items": {"$ref": "#/$defs/Short"}}, ['["a"]'], ['["abc"]', "a"]),
]


@pytest.mark.parametrize(("schema", "good", "wrong"), XML_TEXTS)
def test_a_parameter_written_as_text_keeps_the_limits_of_its_schema(
    llm: LLM, schema: dict[str, Any], good: list[str], wrong: list[str]
) -> None:
    """Any text was allowed unless the schema was an enum itself, and a `$ref` to anything but a
    definition was refused as invalid.
    """
    parameters = {
        "properties": {"x": schema, "p": {"type": "array", "items": {"type": "integer"}}},
        "required": ["x"],
        "$defs": {"Short": {"type": "string", "maxLength": 2}},
    }
    named = {"$ref": "#/$defs/Whole", "$defs": {"Whole": parameters, **parameters["$defs"]}}
    for text, fits in [*((one, True) for one in good), *((one, False) for one in wrong)]:
        element = f"<parameter=x>\n{text}\n</parameter>\n"
        assert_call(llm, parameters, element, fits)
        if "#/properties" not in str(schema):  # of a recursive model the whole is a name, too
            assert_call(llm, named, element, fits)


def assert_call(llm: LLM, parameters: dict[str, Any], text: str, fits: bool) -> None:
    """Whether a call with this text inside is one that the grammar allows."""
    tool = {"name": "run", "parameters": parameters}
    rule = CallRules(QWEN3_CODER, {}).calls([tool], several=False)
    state = llm.engine.grammars.start(grammar_of(rule))
    said = f"<tool_call>\n<function=run>\n{text}</function>\n</tool_call>"
    tokens = llm.tokenizer(said, add_special_tokens=False).input_ids
    assert all(state.accept(token) for token in tokens) is fits
    assert state.is_complete is fits

"""`"keyhole": {"trace": true}`: an answer says which tokens each layer read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from keyhole import LLM, Delta, SamplingParams, StreamingLLM
from keyhole.server.answers import TokenTexts
from tests.checkpoints import make_model, make_tokenizer
from tests.server.conftest import serving

MESSAGES: Any = [{"role": "user", "content": "a text with <b> and é, longer than the budget " * 3}]
POLICY = Delta(token_budget=64, full_layers=(0,), delta_layers=(1,))
ASK = {"model": "small", "messages": MESSAGES, "max_tokens": 6, "temperature": 0.0}
TRACE = {"ignore_eos": True, "keyhole": {"trace": True}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    fields = {"num_hidden_layers": 4, "vocab_size": 300}
    path = make_model("llama", folder, tokenizer=True, **fields)
    return LLM(path, POLICY, page_size=8, memory="8MiB", documents=folder / "documents")


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[openai.OpenAI]:
    with (
        serving(llm, served_model_name="small") as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def shares(token: dict[str, Any], layer: int) -> np.ndarray:
    found = np.zeros(token["length"])
    for start, end, *share in token["ranges"][token["layers"][layer]]:
        found[start:end] = share[0] if share else 1
    return found


def test_an_answer_says_what_was_read(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(**ASK, extra_body=TRACE)
    said = answer.choices[0].model_extra["keyhole"]  # type: ignore[index]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, trace=True)
    result = llm.chat(MESSAGES, params)
    assert [token["id"] for token in said["tokens"]] == result.token_ids
    assert result.reads is not None
    for token, read in zip(said["tokens"], result.reads, strict=True):
        assert token["length"] == read.length
        assert all(np.allclose(shares(token, i), read.shares(i), atol=1e-3) for i in range(4))
    assert said["counters"]["attended_fraction"] == result.stats.attended_fraction < 1


def test_the_texts_of_tokens_are_the_prompt_and_the_answer(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(**ASK, extra_body=TRACE)
    said = answer.choices[0].model_extra["keyhole"]  # type: ignore[index]
    assert "".join(said["prompt"]) == f"[user]{MESSAGES[0]['content']}\n[assistant]"
    assert len(said["prompt"]) == said["tokens"][0]["length"] == answer.usage.prompt_tokens  # type: ignore[union-attr]


def test_a_stream_has_reads_token_by_token(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, extra_body=TRACE)
    stream = client.chat.completions.create(**ASK, stream=True, extra_body=TRACE)
    said = [c.choices[0].model_extra["keyhole"] for c in stream if c.choices]  # type: ignore[index]
    wanted = whole.choices[0].model_extra["keyhole"]  # type: ignore[index]
    assert said[0]["prompt"] == wanted["prompt"]
    assert not any("prompt" in one for one in said[1:])
    assert [token for one in said for token in one["tokens"]] == wanted["tokens"]
    assert said[-1]["counters"] == wanted["counters"]


def test_each_completion_has_its_own(client: openai.OpenAI) -> None:
    body = TRACE | {"keyhole": {"trace": True, "policy": "streaming_llm", "token_budget": 16}}
    answer = client.completions.create(
        model="small", prompt="some words " * 9, n=2, max_tokens=4, extra_body=body
    )
    sinks = StreamingLLM(token_budget=16).sink_size
    for choice in answer.choices:
        said = choice.model_extra["keyhole"]  # type: ignore[index]
        assert len(said["prompt"]) == answer.usage.prompt_tokens  # type: ignore[union-attr]
        for token in said["tokens"][1:]:
            length = token["length"]
            assert token["ranges"] == [[[0, sinks], [length - 16 + sinks, length]]]
            assert token["layers"] == [0] * 4


def test_answers_without_trace_have_no_reads(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK)
    assert "keyhole" not in (answer.choices[0].model_extra or {})


def test_characters_of_several_tokens_stand_with_the_last() -> None:
    tokenizer = make_tokenizer()
    tokens = tokenizer("aé<", add_special_tokens=False).input_ids
    texts = TokenTexts(tokenizer)
    assert texts.next(tokens[:2]) == ["a", ""]
    assert texts.next(tokens[2:]) == ["é", "<"]
    assert TokenTexts(None).next([7, 8]) == ["7 ", "8 "]

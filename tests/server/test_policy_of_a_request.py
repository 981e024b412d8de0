"""The field `keyhole` of a request: what that request alone reads, by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from keyhole import LLM, Delta, Full, SamplingParams, StreamingLLM
from keyhole.server.bodies import CompletionBody
from keyhole.server.errors import ApiError
from tests.checkpoints import make_model
from tests.server.conftest import serving
from tests.server.test_completions import until

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TEXT = "a text that is longer than any of the budgets " * 4
#: What a request says, and the policy of an engine that gives the same.
ASKED: list[tuple[Any, Any]] = [
    (None, Delta(token_budget=64, delta_layers=(1,))),
    ("full", None),
    ({"policy": "full"}, None),
    ({"token_budget": 32}, Delta(token_budget=32, delta_layers=(1,))),
    ({"policy": "delta", "token_budget": 32}, Delta(token_budget=32, delta_layers=(1,))),
    ({"policy": "streaming_llm", "token_budget": 24}, StreamingLLM(token_budget=24)),
    ("StreamingLLM", StreamingLLM(token_budget=64)),  # as much as the server's
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    fields = {"num_hidden_layers": 4, "vocab_size": 300}
    path = make_model("llama", folder, tokenizer=True, **fields)
    return LLM(path, ASKED[0][1], page_size=8, memory="8MiB", max_batch=8, documents=folder / "d")


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[openai.OpenAI]:
    with (
        serving(llm, served_model_name="small") as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def body(asked: Any) -> dict[str, Any]:
    return {"ignore_eos": True} | ({} if asked is None else {"keyhole": asked})


@pytest.mark.usefixtures("own_engine")
def test_requests_of_one_batch_read_what_each_asks_for(
    client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, together = llm.engine.step, [0]

    def counted() -> Any:
        together.append(len(llm.engine.scheduler.running))
        return step()

    def complete(asked: Any) -> Any:
        return client.completions.create(
            model="small", prompt=TEXT, max_tokens=8, temperature=0.0, extra_body=body(asked)
        )

    monkeypatch.setattr(llm.engine, "step", counted)
    metrics = f"{client.base_url}".replace("/v1/", "/metrics")
    with ThreadPoolExecutor(len(ASKED)) as pool:
        with llm.engine.lock:  # no step before all are there
            pending = [pool.submit(complete, asked) for asked, _ in ASKED]
            until(lambda: f"completions_running {len(ASKED)}.0" in httpx2.get(metrics).text)
        found = [one.result() for one in pending]
    assert max(together) == len(ASKED)
    read = []
    for made, (_, policy) in zip(found, ASKED, strict=True):
        wanted = LLM(llm.engine.model, policy, page_size=8, memory="4MiB").generate(TEXT, PARAMS)
        assert made.choices[0].text == wanted.text
        counted = made.usage.model_extra["keyhole"]
        assert counted["attended_fraction"] == wanted.stats.attended_fraction
        read.append(counted["attended_fraction"])
    assert read[1] == read[2] == 1.0
    assert read[3] == read[4] < read[0] < 1.0


def test_chats_streams_and_documents_take_it(client: openai.OpenAI, llm: LLM) -> None:
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    settings = {"model": "small", "messages": messages, "max_tokens": 8, "temperature": 0.0}
    dense = LLM(llm.engine.model, page_size=8, memory="4MiB", documents=llm._store[0])
    wanted = dense.chat(messages, PARAMS)
    made = client.chat.completions.create(**settings, extra_body=body("full"))
    assert made.choices[0].message.content == wanted.text
    assert made.usage.model_extra["keyhole"]["attended_fraction"] == 1.0
    pieces = client.chat.completions.create(**settings, extra_body=body("full"), stream=True)
    said = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert "".join(said) == wanted.text
    llm.documents.add("one", TEXT, block_size=16)
    more = {"documents": ["one"], "reuse": "recompute"}
    made = client.chat.completions.create(**settings, extra_body=body("full") | more)
    asked = dense.ask(TEXT, ["one"], reuse="recompute", params=PARAMS, chat=True)
    assert made.choices[0].message.content == asked.text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"token_budget": 65}, "token_budget 65 must be at most 64, the server's own"),
        ({"policy": "streaming_llm", "token_budget": 65}, "must be at most 64"),
        ({"token_budget": 0}, "token_budget: Input should be greater than or equal to 1"),
        ({"token_budget": 2}, "token_budget 2 must be at least one page"),
        ("quest", "policy 'quest' of this request cannot run with policy 'delta'"),
        ("ful", "did you mean 'full'"),
        ({"policy": "full", "token_budget": 8}, "setting of policy full 'token_budget'"),
        ({"recent_pages": 2}, "recent_pages: Extra inputs are not permitted"),
    ],
)
def test_an_invalid_policy_is_a_clear_error(
    client: openai.OpenAI, llm: LLM, asked: Any, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="small", prompt=TEXT, extra_body=body(asked))
    assert said in error.value.body["message"]  # type: ignore[index]
    with llm.engine.lock:
        assert not llm.engine.has_work


def test_no_budget_is_larger_than_the_longest_sequence() -> None:
    """A server without a budget of its own made state of gigabytes for a request."""
    given = CompletionBody.model_validate(
        {"prompt": "a", "keyhole": {"policy": "r_kv", "token_budget": 1025}}
    )
    with pytest.raises(ApiError, match="token_budget 1025 must be at most 1024, the longest"):
        given.policy(Full(), 1024)
    assert given.policy(Full(), 1025) is not None


@pytest.mark.parametrize("named", ["delta:layers=FILE", "FILE"])
def test_a_request_names_no_files_of_the_server(
    client: openai.OpenAI, tmp_path: Path, named: str
) -> None:
    """Not even whether they are there, or what is wrong with them."""
    file = tmp_path / "secret.json"
    file.write_text('{"policy": "full"}')
    with pytest.raises(openai.BadRequestError, match="unknown policy"):
        client.completions.create(
            model="small", prompt=TEXT, extra_body=body(named.replace("FILE", str(file)))
        )

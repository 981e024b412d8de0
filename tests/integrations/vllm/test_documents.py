"""Stored documents in vLLM: the tokens are those of Keyhole's engine over the same documents.

Run by `make test-vllm`, in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`")

import vllm
from vllm.exceptions import VLLMValidationError

from keyhole.config import SamplingParams
from keyhole.llm import LLM
from tests.integrations.vllm.engines import (
    PAGE_SIZE,
    make_checkpoint,
    random_prompts,
    start,
)

pytestmark = pytest.mark.filterwarnings("default")  # of vLLM and what it brings along

COUNT = 24
#: A whole number of pages, no whole number, less than a page, and more than a block of 64.
DOCUMENTS = dict(
    zip(
        ("pages", "ragged", "short", "long"),
        random_prompts(2 * PAGE_SIZE, 45, 7, 150, seed=7),
        strict=True,
    )
)
QUESTION = random_prompts(20, seed=8)[0]
#: In another order than they were stored in, and one twice.
NAMES = ["ragged", "long", "pages", "short", "ragged"]


def ids(tokens: list[int]) -> Any:
    return {"prompt_token_ids": tokens}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module")
def own(checkpoint: str, place: Path) -> LLM:
    """Keyhole's engine, which encoded the documents."""
    llm = LLM(
        checkpoint,
        dtype="float32",
        device="cpu",
        memory="64MB",
        page_size=PAGE_SIZE,
        documents=str(place),
    )
    for name, tokens in DOCUMENTS.items():
        llm.documents.add(name, ids(tokens))
    return llm


@pytest.fixture(scope="module")
def engine(checkpoint: str, own: LLM, place: Path) -> vllm.LLM:
    return start(
        checkpoint,
        kv_transfer_config={
            "kv_connector": "KeyholeConnector",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"documents": str(place)},
        },
    )


def asked(documents: Any, **more: Any) -> vllm.SamplingParams:
    transfer = {"documents": documents, **more}
    return vllm.SamplingParams(
        max_tokens=COUNT,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": transfer},
    )


def own_answer(own: LLM, names: list[str], reuse: str, **more: Any) -> Any:
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    return own.ask(ids(QUESTION), documents=names, reuse=reuse, params=params, **more)


def tokens_of(engine: vllm.LLM, prompt: list[int], params: vllm.SamplingParams) -> list[int]:
    (output,) = engine.generate([ids(prompt)], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("reuse", ["reuse", "reuse:rotate=False", "epic:num_initial=8", "epic"])
@pytest.mark.parametrize("separator", [[], [10, 11, 12]])
def test_the_tokens_are_those_of_keyholes_engine(
    reuse: str, separator: list[int], engine: vllm.LLM, own: LLM
) -> None:
    """Documents of any length, after a prefix, in any order."""
    expected = own_answer(own, NAMES, reuse, prefix=ids([1]), separator=ids(separator))
    prompt = list(expected.prompt_token_ids)
    got = tokens_of(engine, prompt, asked(NAMES, reuse=reuse))
    assert got == list(expected.token_ids)
    assert got != own_tokens_of(own, prompt), "the documents were computed, not loaded"


def own_tokens_of(own: LLM, prompt: list[int]) -> list[int]:
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    (result,) = own.generate([ids(prompt)], params)
    return list(result.token_ids)


def test_a_plain_request_afterwards_is_exact(engine: vllm.LLM, own: LLM) -> None:
    """Pages of documents are not found by a request that computes the same prompt."""
    expected = own_answer(own, NAMES, "reuse")
    prompt = list(expected.prompt_token_ids)
    got = [tokens_of(engine, prompt, asked(NAMES)) for _ in range(2)]
    assert got == [list(expected.token_ids)] * 2
    plain = vllm.SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    outputs = [engine.generate([ids(prompt)], plain, use_tqdm=False)[0] for _ in range(2)]
    assert [list(x.outputs[0].token_ids) for x in outputs] == [own_tokens_of(own, prompt)] * 2
    # Its own pages are found again.
    assert [bool(output.num_cached_tokens) for output in outputs] == [False, True]


def test_recompute_computes_the_prompt_like_any_other(engine: vllm.LLM, own: LLM) -> None:
    prompt = DOCUMENTS["long"] + QUESTION
    got = tokens_of(engine, prompt, asked(["long"], reuse="recompute"))
    assert got == own_tokens_of(own, prompt)


def test_many_requests_load_beside_those_that_decode(engine: vllm.LLM, own: LLM) -> None:
    """More than fit into the pages at once, some with documents and some without."""
    kinds = [["long", "pages"], ["ragged"], ["pages", "long", "short"], ["short", "pages"]]
    reuse = "epic:num_initial=4"
    expected = [own_answer(own, names, reuse) for names in kinds] * 3
    plain = random_prompts(*[90] * len(expected), seed=9)
    params = vllm.SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    given, each = [], []
    for names, answer, prompt in zip(kinds * 3, expected, plain, strict=True):
        given += [ids(list(answer.prompt_token_ids)), ids(prompt)]
        each += [asked(names, reuse=reuse), params]
    outputs = engine.generate(given, each, use_tqdm=False)
    got = [list(output.outputs[0].token_ids) for output in outputs]
    assert got[::2] == [list(answer.token_ids) for answer in expected]
    assert got[1::2] == [own_tokens_of(own, prompt) for prompt in plain]


@pytest.mark.parametrize(
    ("transfer", "said"),
    [
        ({"documents": ["lnog"]}, "unknown document 'lnog'; did you mean 'long'"),
        ({"documents": []}, r"documents \[\] must be a list of at least one stored name"),
        ({"documents": ["long"], "reuse": "epik"}, "did you mean 'epic'"),
        ({"documents": ["long"], "reuse": "epic:num_initial=-1"}, "num_initial -1 must be"),
        ({"documents": ["long"], "reuse": "cacheblend"}, "'cacheblend' cannot run in vLLM"),
        ({"documents": ["long"], "method": "epic"}, "'method' must be one of"),
        (
            {"documents": ["pages", "long"]},
            "150 tokens of document 'long' are not in the prompt from token 214 on",
        ),
        ({"documents": ["long", "pages"]}, "the prompt ends with document 'pages'"),
    ],
)
def test_a_bad_request_is_refused_with_one_line_and_the_engine_goes_on(
    transfer: dict[str, Any], said: str, engine: vllm.LLM, own: LLM
) -> None:
    prompt = DOCUMENTS["long"] + DOCUMENTS["pages"]
    params = asked(None)
    params.extra_args = {"kv_transfer_params": transfer}
    with pytest.raises(VLLMValidationError, match=said) as error:
        tokens_of(engine, prompt, params)
    assert "\n" not in str(error.value)


def test_a_record_that_goes_away_ends_its_request_alone(
    engine: vllm.LLM, own: LLM, place: Path
) -> None:
    own.documents.add("gone", ids(random_prompts(40, seed=10)[0]))
    digest = own.documents.get("gone").digest
    prompt = random_prompts(40, seed=10)[0] + QUESTION
    assert len(tokens_of(engine, prompt, asked(["gone"]))) == COUNT
    for record in (place / "records").glob(f"{digest}*"):
        record.unlink()
    # Its tokens are known from the request before: the load finds that it is gone.
    (output,) = engine.generate([ids(prompt)], asked(["gone"]), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert len(tokens_of(engine, DOCUMENTS["long"] + QUESTION, asked(["long"]))) == COUNT

"""The OpenAPI document, and schemathesis, which makes requests of it: right ones and wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance

from keyhole import LLM, AsyncLLM
from keyhole.server.app import create_app
from tests.checkpoints import make_model
from tests.server.conftest import serving

#: Requests of each kind.
EXAMPLES = [4, pytest.param(100, marks=pytest.mark.slow)]
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("PUT", "/v1/documents/{name}"),
    ("GET", "/v1/documents/{name}"),
    ("DELETE", "/v1/documents/{name}"),
    ("POST", "/v1/documents"),
    ("GET", "/v1/documents"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    *(("GET", path) for path in ("/v1/keyhole", "/v1/models", "/health", "/ready", "/version")),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """One whose longest answer takes a moment."""
    folder = tmp_path_factory.mktemp("model")
    path = make_model("llama", folder, tokenizer=True, num_hidden_layers=1, vocab_size=300)
    return LLM(path, memory="8MiB", max_batch=4, max_length=64, documents=folder / "documents")


@pytest.fixture(scope="module")
def fuzzed(llm: LLM) -> Iterator[str]:
    with serving(llm, max_completions=3) as address:
        yield address


@pytest.fixture(scope="module")
def schema(llm: LLM) -> Any:
    return schemathesis.openapi.from_dict(create_app(AsyncLLM(llm)).openapi())


def test_the_document_names_what_is_served(fuzzed: str, schema: Any) -> None:
    said = httpx2.get(f"{fuzzed}/openapi.json").json()
    found = {
        (method.upper(), path) for path, methods in said["paths"].items() for method in methods
    }
    assert found == set(OPERATIONS)
    assert said == schema.raw_schema


#: With bodies or queries that can be wrong: any text is a name of a document, and a document.
RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CASES = [(RIGHT, *one) for one in OPERATIONS] + [
    (WRONG, method, path)
    for method, path in OPERATIONS
    if method == "POST" or path == "/v1/documents"
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "method", "path"), CASES)
@pytest.mark.parametrize("examples", EXAMPLES)
def test_no_request_makes_the_server_fail(
    fuzzed: str,
    schema: Any,
    llm: LLM,
    mode: GenerationMode,
    method: str,
    path: str,
    examples: int,
) -> None:
    @settings(max_examples=examples, suppress_health_check=[*HealthCheck])
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call(base_url=fuzzed, timeout=60)
        if answer.status_code != 504:  # a request may set its own timeout
            assert answer.status_code < 500, answer.text
        case.validate_response(answer, checks=[response_schema_conformance])

    check()
    assert httpx2.get(f"{fuzzed}/ready").status_code == 200
    with llm.engine.lock:
        llm.engine.check_integrity()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_no_body_of_bytes_does(fuzzed: str, examples: int) -> None:
    @given(
        path=st.sampled_from([path for method, path in OPERATIONS if method == "POST"]),
        kind=st.sampled_from(["application/json", "multipart/form-data; boundary=x", "text/plain"]),
        body=st.binary() | st.text().map(str.encode),
    )
    @settings(max_examples=5 * examples)
    def check(path: str, kind: str, body: bytes) -> None:
        answer = client.post(path, content=body, headers={"content-type": kind})
        assert 400 <= answer.status_code < 500
        assert answer.json()["error"]["message"]

    with httpx2.Client(base_url=fuzzed) as client:
        check()

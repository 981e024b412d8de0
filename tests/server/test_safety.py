"""What a server refuses unless its settings allow it."""

from __future__ import annotations

import hmac
import json
import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from keyhole import LLM, ModelError
from keyhole.cli import main
from keyhole.models.loading import load
from keyhole.server import gate
from keyhole.server.settings import ServerConfig
from tests.checkpoints import make_model
from tests.server.conftest import serving

_BODY = {"prompt": "secret words", "max_tokens": 2}


def test_listening_on_other_addresses_needs_a_key_or_insecure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ServerConfig().host == "127.0.0.1"
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "give an api_key, or set insecure" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_no_other_address_counts_as_this_machine(host: str) -> None:
    with pytest.raises(Exception, match="can be reached from other machines"):
        ServerConfig(host=host)


def test_every_key_is_compared_in_constant_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key that fits does not end the comparison."""
    compared: list[bytes] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(given, known)

    class Spy:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(gate, "hmac", Spy)
    with serving(llm, api_key=("first", "second")) as address:
        for key in ("first", "fir", "x"):
            httpx2.get(f"{address}/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert compared == [b"first", b"second"] * 3


def test_a_key_may_have_any_letters(llm: LLM) -> None:
    with serving(llm, api_key=("clé",)) as address:
        for key, status in (("clé", 200), ("cle", 401)):
            headers = {b"Authorization": f"Bearer {key}".encode()}
            assert httpx2.get(f"{address}/v1/models", headers=headers).status_code == status


@pytest.mark.slow
def test_the_documentation_of_the_api_loads_nothing_from_elsewhere(llm: LLM) -> None:
    """And a browser, which sends no key by itself, can open it."""
    with serving(llm, api_key=("k",)) as address:
        page = httpx2.get(f"{address}/docs").text
        assert not re.findall(r"""["']https?://[^"']*""", page)
        loaded = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
        assert any(path.endswith("swagger-ui-bundle.js") for path in loaded)
        for path in loaded:
            assert httpx2.get(address + path).status_code == 200
        said = httpx2.get(f"{address}/openapi.json").json()
        assert said["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
        assert said["paths"]["/v1/completions"]["post"]["security"] == [{"HTTPBearer": []}]
        for path in ("/v1/models", "/static-offline-docs/../v1/models", "/docs/x"):
            assert httpx2.get(address + path).status_code == 401


def test_no_other_site_is_let_in(address: str) -> None:
    """CORS is off: no answer lets another origin read it, and no preflight allows a request."""
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "PUT"}
    for method, path in (("OPTIONS", "/v1/documents/x"), ("GET", "/v1/models")):
        answer = httpx2.request(method, address + path, headers=asked)
        assert answer.status_code == 403
        assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "localhost:7", "Origin": "http://localhost:7"}, 200),
        ({"Host": "localhost:7", "Origin": "http://localhost:8"}, 403),
        ({"Host": "evil.example"}, 403),  # whose name leads to 127.0.0.1
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "[::1"}, 403),  # these two were a 500
        ({"Origin": "http://[::1"}, 403),
    ],
)
def test_a_page_of_another_site_cannot_use_a_server_without_a_key(
    address: str, headers: dict[str, str], status: int
) -> None:
    assert httpx2.get(f"{address}/v1/models", headers=headers).status_code == status


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"insecure": True}, {"api_key": ("k",)}])
def test_a_proxy_of_any_name_may_stand_before_other_servers(
    llm: LLM, settings: dict[str, Any]
) -> None:
    key = {"Authorization": "Bearer k"}
    with serving(llm, **settings) as address:
        for host in ("llm.example", "[::1"):
            headers = {"Host": host, **key}
            assert httpx2.get(f"{address}/v1/models", headers=headers).status_code == 200
            assert httpx2.get(f"{address}/nowhere", headers=headers).status_code == 404


def test_a_body_must_say_that_it_is_json(address: str) -> None:
    """A form of another site can send text/plain, and nothing else without being asked first."""
    headers = {"content-type": "text/plain"}
    answer = httpx2.post(f"{address}/v1/completions", content=json.dumps(_BODY), headers=headers)
    assert answer.status_code == 400


def test_a_prompt_that_is_too_long_is_refused(llm: LLM, address: str) -> None:
    body = _BODY | {"prompt": "x" * (llm.engine.max_length + 1)}
    answer = httpx2.post(f"{address}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_batch_of_prompts_has_a_limit(llm: LLM) -> None:
    with serving(llm, max_completions=3) as address:
        place = f"{address}/v1/completions"
        assert httpx2.post(place, json=_BODY | {"prompt": ["a"] * 3}).status_code == 200
        for more in ({"prompt": ["a"] * 4}, {"prompt": ["a"] * 2, "n": 2}):
            answer = httpx2.post(place, json=_BODY | more)
            assert answer.status_code == 400
            assert "at most 3 are allowed" in answer.json()["error"]["message"]


def test_each_caller_may_store_so_many_documents(llm: LLM) -> None:
    with serving(llm, api_key=("a", "b"), max_documents=2) as address:

        def put(key: str, name: str, **fields: Any) -> httpx2.Response:
            headers = {"Authorization": f"Bearer {key}"}
            place = f"{address}/v1/documents/{name}"
            return httpx2.put(place, json={"text": "some text"} | fields, headers=headers)

        assert put("a", "a1", metadata={"by": "Ann"}).status_code == 201
        assert put("a", "a2").status_code == 201
        refused = put("a", "a3")
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "too_many_documents"
        assert put("b", "b1").status_code == 201
        again = put("a", "a1")  # no new one, and the same text keeps its metadata
        assert (again.status_code, again.json()["metadata"]) == (201, {"by": "Ann"})
        assert put("b", "b2", metadata={"keyhole_caller": "x"}).status_code == 400
        headers = {"Authorization": "Bearer a"}
        for name in ("a1", "a2", "b1"):
            place = f"{address}/v1/documents/{name}"
            assert "keyhole_caller" not in httpx2.get(place, headers=headers).text
            assert httpx2.delete(place, headers=headers).status_code == 200


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG)
    return caplog


@pytest.mark.slow
def test_no_text_of_a_request_is_logged(
    llm: LLM, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of good requests, wrong ones, or ones that fail within the server."""

    def fail(*_: object) -> None:
        raise RuntimeError("within a step")

    chat = {"messages": [{"role": "user", "content": "secret words"}], "max_tokens": 2}
    with serving(llm) as address:
        requests: list[tuple[str, dict[str, Any]]] = [
            ("completions", _BODY),
            ("completions", _BODY | {"stream": True}),
            ("completions", _BODY | {"n": "secret"}),
            ("chat/completions", chat),
            ("chat/completions", chat | {"documents": {"search": {}}}),
            ("chat/completions", chat | {"documents": "secret"}),
        ]
        for path, body in requests:
            httpx2.post(f"{address}/v1/{path}", json=body)
        httpx2.put(f"{address}/v1/documents/d", content=b"secret words")
        httpx2.get(f"{address}/v1/documents", params={"query": "secret words"})
        httpx2.delete(f"{address}/v1/documents/d")
        monkeypatch.setattr(llm.engine, "step", fail)
        for stream in (False, True):
            httpx2.post(f"{address}/v1/completions", json=_BODY | {"stream": stream})
    ours = [record for record in log.records if not record.name.startswith("http")]
    text = "\n".join(map(logging.Formatter().format, ours))
    assert text.count("path=") == 11
    assert text.count("status=500") == 2
    assert "within a step" in text
    assert "secret" not in text


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_pickled_code_in_weights_does_not_run(tmp_path: Path) -> None:
    path = Path(make_model("llama", tmp_path))
    (path / "model.safetensors").unlink()
    ran = tmp_path / "ran"
    torch.save({"lm_head.weight": Evil(ran)}, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(str(path))
    assert not ran.exists()
    pickle.loads(pickle.dumps(Evil(ran)))  # as it would have
    assert ran.exists()


def test_code_in_a_models_folder_does_not_run(tmp_path: Path) -> None:
    path = Path(make_model("llama", tmp_path))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ran = tmp_path / "ran"
    (path / "evil.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n", encoding="utf-8")
    with pytest.raises(ModelError, match="give trust_remote_code=True"):
        load(str(path))
    assert not ran.exists()

"""The page's files: there with a strict policy, without a key, and not at all with `--no-page`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from importlib import resources

import httpx2 as httpx
import pytest

from keyhole import LLM
from keyhole.server.page.routes import HEADERS
from tests.server.conftest import serving

PAGE = resources.files("keyhole.server.page")
VENDOR = PAGE / "vendor"
NAMES = sorted(f.name for f in PAGE.iterdir() if f.name.endswith((".html", ".css", ".js", ".svg")))


@pytest.fixture
def web(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address) as client:
        yield client


def test_the_page_is_at_the_root(web: httpx.Client) -> None:
    answer = web.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Keyhole</title>" in answer.text


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_with_the_policy(web: httpx.Client, name: str) -> None:
    answer = web.get(f"/page/{name}")
    assert answer.status_code == 200
    assert {key: answer.headers[key] for key in HEADERS} == HEADERS
    again = web.get(f"/page/{name}", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_scripts_and_styles_are_files_of_this_server() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert not re.search(r"unsafe|https?:|\*", policy)
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|style=|<script(?![^>]* src=)|\son\w+=|javascript:", html)
    for name in NAMES:
        text = (PAGE / name).read_text()
        loaded = re.findall(r"""(?:src|href|from|import|url)\s*[=(]?\s*["'](https?:[^"']+)""", text)
        assert not loaded, name


def test_no_text_becomes_markup_but_through_the_sanitiser() -> None:
    for name in NAMES:
        text = (PAGE / name).read_text()
        unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function"
        assert not re.search(unsafe, text), name


def test_every_file_that_the_page_names_is_there(web: httpx.Client) -> None:
    named = re.findall(r'(?:src|href)="(/page/[^"]+)"', (PAGE / "index.html").read_text())
    for name in NAMES:
        if name.endswith(".js"):
            text = (PAGE / name).read_text()
            named += [f"/page/{path}" for path in re.findall(r'from "\./([^"]+)"', text)]
            named += [f"/page/{path}" for path in re.findall(r'import "\./([^"]+)"', text)]
    assert all(web.get(path).status_code == 200 for path in named)


@pytest.mark.parametrize("path", ["../app.py", "routes.py", "vendor/README.md", "none.js", ""])
def test_nothing_else_is_served(web: httpx.Client, path: str) -> None:
    answer = web.get("/page/" + path.replace("..", "%2e%2e"))
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


def test_the_page_needs_no_key_and_what_it_asks_for_does(llm: LLM) -> None:
    with serving(llm, api_key=("secret",)) as address, httpx.Client(base_url=address) as web:
        assert web.get("/").status_code == 200
        assert web.get("/page/app.js").status_code == 200
        assert web.get("/v1/keyhole").status_code == 401
        known = web.get("/v1/keyhole", headers={"Authorization": "Bearer secret"})
        assert known.status_code == 200


def test_a_server_without_the_page(llm: LLM) -> None:
    with serving(llm, page=False) as address, httpx.Client(base_url=address) as web:
        assert web.get("/").status_code == 404
        assert web.get("/page/app.js").status_code == 404
        assert web.get("/v1/keyhole").status_code == 200


def test_what_the_server_runs(web: httpx.Client, llm: LLM) -> None:
    found = web.get("/v1/keyhole").json()
    assert (found["model"], found["chat"]) == ("small", True)
    assert found["policy"] == {"name": "full"}
    policies = {one["name"]: one for one in found["policies"]}
    assert policies["streaming_llm"]["unavailable"] is None
    assert policies["streaming_llm"]["has_budget"]
    assert not policies["full"]["has_budget"]
    assert "retrieval head" in policies["spe_context"]["unavailable"]
    assert found["layers"] == llm.engine.geometry.num_layers
    assert "sam_kv" in found["reuses"]


def test_the_libraries_are_those_that_the_list_names() -> None:
    rows = re.findall(
        r"^\| `(\S+)` .* `([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.MULTILINE
    )
    assert {name for name, _ in rows} == {
        f.name for f in VENDOR.iterdir() if f.name.endswith(".js")
    }
    for name, digest in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest

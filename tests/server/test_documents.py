"""/v1/documents, and questions over what is stored there."""

from __future__ import annotations

import io
import logging
import re
import socket
import threading
import time
import uuid
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import openai
import pytest

from keyhole import LLM, ConfigError, SamKV, SamplingParams
from keyhole.documents.remote import RemoteStorage
from keyhole.documents.search import BM25
from keyhole.documents.storage import Entry
from keyhole.server.documents import convert
from keyhole.server.documents.passages import passages_of
from keyhole.server.errors import GONE, ApiError
from tests.documents.test_embeddings import make_encoder
from tests.documents.test_search import TEXTS as TEXTS_OF_WORDS
from tests.server.conftest import serving

TEXTS = {"one": "the first document " * 8, "shelf/two": "another, about pears " * 9}


@pytest.fixture(scope="module")
def stored(address: str) -> dict[str, Any]:
    found = {}
    for name, text in TEXTS.items():
        answer = httpx2.put(f"{address}/v1/documents/{name}", content=text.encode())
        assert answer.status_code == 201
        found[name] = answer.json()
    return found


def test_documents_are_listed_looked_up_and_removed(address: str, stored: dict[str, Any]) -> None:
    place = f"{address}/v1/documents"
    assert [one["id"] for one in httpx2.get(place).json()["data"]] == sorted(stored)
    one = httpx2.get(f"{place}/shelf/two").json()
    assert one["tokens"] == len(TEXTS["shelf/two"])
    assert one["size_bytes"] > 0
    question = {"messages": [{"role": "user", "content": "?"}], "documents": ["shelf/two"]}
    answer = httpx2.post(f"{address}/v1/chat/completions", json=question | {"max_tokens": 1})
    assert answer.status_code == 200
    assert httpx2.get(f"{place}/shelf/two").json()["hits"] == one["hits"] + 1
    body = {"text": "short", "pinned": True}
    assert httpx2.put(f"{place}/gone", json=body).json()["pinned"]
    assert httpx2.put(f"{place}/gone", json={"text": "shorter"}).json()["pinned"]
    body = {"text": "short", "pinned": False}
    assert not httpx2.put(f"{place}/gone", json=body).json()["pinned"]
    assert httpx2.delete(f"{place}/gone").json() == {
        "id": "gone",
        "object": "document",
        "deleted": True,
    }
    for method in (httpx2.get, httpx2.delete):
        answer = method(f"{place}/gone")
        assert answer.status_code == 404
        assert "gone" in answer.json()["error"]["message"]


def test_a_removed_document_is_gone_though_the_search_fails(
    address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was an error, and that of a second try was 404."""
    llm.documents.add("gone", "a zebra")

    def fails(self: BM25, documents: object, text: object) -> None:
        raise ConfigError("the search table cannot be used: database is locked")

    with monkeypatch.context() as patched:
        patched.setattr(BM25, "update", fails)
        answer = httpx2.delete(f"{address}/v1/documents/gone")
    assert answer.status_code == 200
    assert answer.json()["deleted"]
    found = httpx2.get(f"{address}/v1/documents", params={"query": "zebra"}).json()
    assert found["data"] == []


@pytest.mark.usefixtures("own_engine")
def test_a_store_that_opens_slowly_holds_up_no_other_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop waited for it: no request had an answer until a far store had been read."""
    opens, may_open, real = threading.Event(), threading.Event(), RemoteStorage.files

    def slow(self: RemoteStorage, folder: str) -> dict[str, Entry]:
        opens.set()
        assert may_open.wait(60)
        return real(self, folder)

    monkeypatch.setattr(RemoteStorage, "files", slow)
    far = LLM(llm.engine.model, memory="1MiB", documents=f"memory://{uuid.uuid4().hex}")
    with serving(far) as address, ThreadPoolExecutor() as pool:
        listed = pool.submit(httpx2.get, f"{address}/v1/documents", timeout=60)
        try:
            assert opens.wait(60)
            assert httpx2.get(f"{address}/health", timeout=10).status_code == 200
        finally:
            may_open.set()
        assert listed.result().json()["data"] == []


def test_a_document_whose_record_was_evicted_says_so(address: str, llm: LLM) -> None:
    """It said that another model had encoded it."""
    place = f"{address}/v1/documents/evicted"
    digest = httpx2.put(place, content=b"an evicted text").json()["digest"]
    catalogue = llm.documents.store._catalogue
    catalogue.collect(catalogue.records_of(digest))
    found = httpx2.get(place).json()
    assert (found["status"], found["error"]) == ("failed", "its record was evicted; store it again")
    assert httpx2.put(place, content=b"an evicted text").json()["status"] == "ready"
    httpx2.delete(place)


def test_a_damaged_record_is_the_servers_failure(
    address: str, llm: LLM, own_engine: None, caplog: pytest.LogCaptureFixture
) -> None:
    place = f"{address}/v1/documents/damaged"
    digest = httpx2.put(place, content=b"a text whose record is cut").json()["digest"]
    (record,) = Path(llm.documents.place, "records").glob(f"{digest}-*")
    record.write_bytes(record.read_bytes()[:-1])
    question = {"messages": [{"role": "user", "content": "?"}], "documents": ["damaged"]}
    answer = httpx2.post(f"{address}/v1/chat/completions", json=question)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "unreadable_document")
    assert "verify" in error["message"]
    assert "a request failed" in caplog.text
    httpx2.delete(place)


def test_two_files_in_one_request_are_refused(address: str) -> None:
    """The first one was dropped."""
    files = [("file", (f"file{i}.txt", b"some text")) for i in range(2)]
    answer = httpx2.post(f"{address}/v1/documents", files=files)
    assert answer.status_code == 400
    assert "only one file per request" in answer.json()["error"]["message"]
    assert httpx2.get(f"{address}/v1/documents/file1.txt").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("PUT", "/v1/documents/half", "/v1/documents/{name:path}"),
        ("POST", "/v1/completions", "/v1/completions"),
    ],
)
def test_a_body_that_ends_early_is_nobodys_failure(
    address: str,
    own_engine: None,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    route: str,
) -> None:
    """It was logged with a traceback, and counted as status 500, or as a wrong body."""
    host, port = address.removeprefix("http://").split(":")
    name = re.escape(f'keyhole_requests_total{{path="{route}",status="{GONE}"}} ')

    def counted() -> float:
        found = re.search(name + r"(\S+)", httpx2.get(f"{address}/metrics").text)
        return float(found[1]) if found else 0.0

    before = counted()
    with caplog.at_level(logging.INFO, "keyhole.server"):
        with socket.create_connection((host, int(port))) as client:
            head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 999\r\n\r\n"
            client.sendall(head.encode() + b"some")
            time.sleep(0.2)
        end = time.monotonic() + 30
        while counted() == before:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert httpx2.get(f"{address}/v1/documents/half").status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "../../outside",
        "/etc/outside",
        "..\\..\\outside",
        "C:outside",
        "documents/../../x",
        "\ufe52\ufe52\u2215outside",  # their compatible forms are dots and a slash
        "e\u0301 and \u00e9",
        "con",
        "%2e%2e%2foutside",
        "'; DROP TABLE documents; --",
    ],
)
def test_a_name_is_no_path(address: str, llm: LLM, name: str) -> None:
    """Files are called by digests; a name stands in them and in the index alone."""
    store = Path(llm.documents.place)

    def outside() -> set[Path]:
        # Not what is deeper in the folders of other tests, which are thousands of files.
        found = {*store.parent.parent.iterdir(), *store.parent.rglob("*")}
        return {path for path in found if store not in path.parents}

    before = outside()
    place = f"{address}/v1/documents/{quote(name, safe='')}"
    assert httpx2.put(place, content=b"x").json()["id"] == name
    assert [one["id"] for one in httpx2.get(f"{address}/v1/documents").json()["data"]].count(name)
    inside = [str(path.relative_to(store)) for path in store.rglob("*")]
    assert all(
        re.fullmatch(r"[a-z]+(/[0-9a-f-]+(\.\w+)?)?|[a-z]+\.sqlite(-\w+)?", p) for p in inside
    )
    assert httpx2.get(place).json()["id"] == name
    assert httpx2.delete(place).status_code == 200
    assert outside() == before


@pytest.mark.parametrize("reuse", [None, "reuse", {"method": "sam_kv", "update": "fusion"}])
def test_an_answer_over_documents_is_that_of_ask(
    client: openai.OpenAI, llm: LLM, stored: dict[str, Any], reuse: Any
) -> None:
    made = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "which?"}],
        max_tokens=6,
        temperature=0.0,
        extra_body={"documents": [*stored], "reuse": reuse, "ignore_eos": True},
    )
    method: Any = SamKV(update="fusion") if isinstance(reuse, dict) else reuse
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    expected = llm.ask("which?", [*stored], reuse=method, params=params, chat=True)
    assert made.choices[0].message.content == expected.text
    counted = made.usage.model_extra["keyhole"]
    assert counted["sequence_ratio"] == pytest.approx(expected.stats.sequence_ratio)


@pytest.mark.parametrize(
    ("path", "sent", "said"),
    [
        ("a", {"content": b"\xff"}, "UTF-8"),
        ("a", {"json": {"no": 1}}, "text"),
        ("a", {"content": b""}, "the document is empty"),
        ("a%00b", {"content": b"x"}, "name"),
        ("%E2%80%AEa", {"content": b"x"}, "name"),
        ("%20", {"content": b"x"}, "name"),
        ("a" * 201, {"content": b"x"}, "at most 200"),
        ("a", {"json": {"text": "x", "metadata": [1]}}, "metadata"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    address: str, path: str, sent: dict[str, Any], said: str
) -> None:
    answer = httpx2.put(f"{address}/v1/documents/{path}", **sent)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reuse": "nothing"}, "nothing"),
        ({"reuse": {"update": "fusion"}}, "reuse.method"),
        ({"messages": [{"role": "system", "content": "x"}]}, "a single text message"),
        ({"documents": {"search": {"query": "zebra"}}}, "zebra"),
        ({"documents": {"search": {"top_k": 0}}}, "top_k"),
        ({"documents": {"find": {}}}, "search"),
        ({"documents": ["nowhere"]}, "nowhere"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(
    address: str, stored: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    messages = [{"role": "user", "content": "which?"}]
    body = {"messages": messages, "documents": [*stored], **given}
    answer = httpx2.post(f"{address}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def ask(client: openai.OpenAI, **more: Any) -> dict[str, Any]:
    made = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "are there pears?"}],
        max_tokens=2,
        extra_body={"ignore_eos": True, **more},
    )
    assert made.usage is not None
    counted: dict[str, Any] = (made.usage.model_extra or {})["keyhole"]
    return counted


def per_character(passages: list[dict[str, Any]], text: str) -> list[int]:
    """Layers of each character; each token of this model's is one."""
    found = [0] * len(text)
    for one in passages:
        assert one["text"] == text[one["start"] : one["end"]]
        assert one["tokens"] == [one["start"], one["end"]]
        assert not any(found[one["start"] : one["end"]])
        found[one["start"] : one["end"]] = [one["layers"]] * (one["end"] - one["start"])
    return found


@pytest.mark.parametrize("reuse", ["reuse", "sam_kv", "cacheblend"])
def test_an_answer_says_which_passages_it_used(
    client: openai.OpenAI, llm: LLM, stored: dict[str, Any], reuse: str
) -> None:
    told = ask(client, documents=[*stored], reuse=reuse)["documents"]
    params = SamplingParams(max_tokens=1)
    reused = llm.ask("are there pears?", [*stored], reuse=reuse, params=params, chat=True).reused
    assert reused is not None
    assert [one["name"] for one in told] == [*stored]
    for name, marks in (("kept", reused.kept), ("recomputed", reused.recomputed)):
        found = [n for one in told for n in per_character(one[name], TEXTS[one["name"]])]
        assert found == marks.sum(0).tolist()


def test_passages_of_a_text_that_was_replaced_have_no_characters(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    for text in ("seventeen pears", "seventeen plums"):  # as many tokens
        llm.documents.add("changed", text, overwrite=True)
        asked = llm.ask("how many?", ["changed"], reuse="reuse", params=params).reused
        if text.endswith("pears"):
            before = asked
    assert before is not None
    assert asked is not None
    (old,), (new,) = (
        passages_of(llm.documents, one, llm.tokenizer)[0]["kept"] for one in (before, asked)
    )
    llm.documents.remove("changed")
    assert new == {**old, "start": 0, "end": 15, "text": "seventeen plums"}
    assert old.keys() == {"layers", "tokens"}


def test_passages_are_omitted_on_request_and_without_reuse(
    client: openai.OpenAI, stored: dict[str, Any]
) -> None:
    names = [{"name": name} for name in stored]
    assert ask(client, documents=[*stored], passages=False)["documents"] == names
    assert ask(client, documents=[*stored], reuse="recompute")["documents"] == names


def test_a_stream_has_passages_in_its_usage(client: openai.OpenAI, stored: dict[str, Any]) -> None:
    stream = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "are there pears?"}],
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"documents": [*stored]},
    )
    *_, last = stream
    assert last.usage is not None
    told = (last.usage.model_extra or {})["keyhole"]["documents"]
    assert [one["name"] for one in told] == [*stored]
    assert all(one["kept"] for one in told)


@pytest.mark.parametrize(
    ("search", "names"),
    [
        ({}, ["shelf/two"]),
        ({"query": None, "top_k": 8}, ["shelf/two"]),
        ({"query": 'the FIRST "one (of them)'}, ["one"]),
        ({"query": "pears, or a document", "top_k": 1}, ["shelf/two"]),
    ],
)
def test_documents_are_found_by_a_search(
    client: openai.OpenAI, stored: dict[str, Any], search: dict[str, Any], names: list[str]
) -> None:
    told = ask(client, documents={"search": search})["documents"]
    assert [one["name"] for one in told] == names


def test_a_search_follows_what_is_stored_and_removed(
    address: str, llm: LLM, stored: dict[str, Any]
) -> None:
    place = f"{address}/v1/documents"

    def found(query: str) -> list[str]:
        answer = httpx2.get(place, params={"query": query})
        return [one["id"] for one in answer.json()["data"]]

    assert found("zebra") == []
    assert httpx2.put(f"{place}/new", content=b"A zebra.").status_code == 201
    assert found("zebra") == ["new"]
    llm.documents.add("beside", "Another zebra, by another program.")
    assert sorted(found("zebra")) == ["beside", "new"]
    for name in ("new", "beside"):
        assert httpx2.delete(f"{place}/{name}").status_code == 200
    assert found("zebra") == []
    assert httpx2.get(place, params={"query": "pears"}).json()["data"][0]["score"] > 0


def upload(address: str, filename: str, data: bytes, **fields: str) -> httpx2.Response:
    return httpx2.post(f"{address}/v1/documents", files={"file": (filename, data)}, data=fields)


def test_a_file_is_stored_under_its_name_or_another(address: str, llm: LLM) -> None:
    answer = upload(address, "notes.md", b"\xef\xbb\xbf# Notes\n", metadata='{"by": "Ann"}')
    assert answer.status_code == 201, answer.text
    assert (answer.json()["id"], answer.json()["metadata"]) == ("notes.md", {"by": "Ann"})
    assert llm.documents.text("notes.md") == "# Notes\n"
    assert upload(address, "notes.txt", b"x", name="other").json()["id"] == "other"
    for name in ("notes.md", "other"):
        assert httpx2.delete(f"{address}/v1/documents/{name}").status_code == 200


@pytest.mark.parametrize(
    ("filename", "data", "fields", "status", "said"),
    [
        ("a.exe", b"x", {}, 415, "supported formats: .docx"),
        ("a", b"x", {}, 415, ".md"),
        ("", b"x", {}, 400, "file must be a file with a filename, such as notes.txt"),
        ("a.txt", b"\xff", {}, 400, "UTF-8"),
        ("a.txt", b"", {}, 400, "the document is empty"),
        ("a.txt", b"x", {"name": "a\x00b"}, 400, "printable"),
        ("a.txt", b"x", {"name": "a\nb"}, 400, "printable"),
        ("a.txt", b"x", {"metadata": "{"}, 400, "metadata"),
        ("a.txt", b"x", {"metadata": "[]"}, 400, "JSON object"),
    ],
)
def test_a_file_that_cannot_be_stored_is_refused(
    address: str, filename: str, data: bytes, fields: dict[str, str], status: int, said: str
) -> None:
    answer = upload(address, filename, data, **fields)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]


def test_without_the_converter_the_error_names_the_extra(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "find_spec", lambda _: None)
    for filename in ("a.html", "a.PDF", "a.docx"):
        answer = upload(address, filename, b"x")
        assert answer.status_code == 415
        assert "keyhole[convert]" in answer.json()["error"]["message"]
    assert upload(address, "a.md", b"x").status_code == 201
    assert httpx2.delete(f"{address}/v1/documents/a.md").status_code == 200


def pdf(text: str) -> bytes:
    """The smallest file with one page of one line."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % p for p in places)
    return body + table + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(body)


def docx(text: str) -> bytes:
    """The smallest archive that is a document of one paragraph."""
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    names = "http://schemas.openxmlformats.org"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{names}/package/2006/content-types">'
        '<Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/word/document.xml" ContentType="{kind}"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{names}/package/2006/relationships">'
        f'<Relationship Id="r1" Type="{names}/officeDocument/2006/relationships/officeDocument" '
        'Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{names}/wordprocessingml/2006/main">'
        f"<w:body><w:p><w:r><w:t>{text}</w:t></w:r></w:p></w:body></w:document>",
    }
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return made.getvalue()


_MARKITDOWN = "the converter is an extra of 200 MB, which `make test-clients` has"
FILES = {
    "page.html": b"<h1>Lamps</h1><script>no()</script><p>A green lamp.</p>",
    "page.pdf": pdf("A green lamp."),
    "page.docx": docx("A green lamp."),
}


@pytest.mark.parametrize("filename", FILES)
@pytest.mark.filterwarnings("ignore")  # of the packages that read these files
def test_a_file_becomes_text(address: str, llm: LLM, filename: str) -> None:
    pytest.importorskip("markitdown", reason=_MARKITDOWN)
    text = convert.text_of(filename, FILES[filename])
    assert "A green lamp." in text
    assert "no()" not in text
    if filename.endswith("html"):
        assert text.startswith("# Lamps")
    assert upload(address, filename, FILES[filename]).status_code == 201
    assert llm.documents.text(filename) == text
    llm.documents.remove(filename)


@pytest.mark.parametrize(
    ("filename", "data"), [("a.pdf", b"x"), ("a.docx", b"x"), ("a.html", b""), ("a.docx", b"PK")]
)
@pytest.mark.filterwarnings("ignore")
def test_a_broken_file_is_an_error_of_one_line(filename: str, data: bytes) -> None:
    pytest.importorskip("markitdown", reason=_MARKITDOWN)
    with pytest.raises(ApiError, match=re.escape(filename)) as caught:
        convert.text_of(filename, data)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)


def test_an_archive_that_grows_too_much_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "find_spec", lambda _: True)
    with pytest.raises(ApiError, match="unpacks to") as caught:
        convert.text_of("bomb.docx", docx("x" * 1_000_000))
    assert caught.value.status == 413


def test_documents_are_found_by_their_meaning(llm: LLM, tmp_path: Path) -> None:
    """With an encoder: a query that is a document's text finds it."""
    folder = make_encoder(tmp_path / "encoder")
    texts = {"lamps": TEXTS_OF_WORDS["lamp"], "fruit": TEXTS_OF_WORDS["fruit"]}
    with serving(llm, embeddings=str(folder)) as address:
        place = f"{address}/v1/documents"
        for name, text in texts.items():
            assert httpx2.put(f"{place}/{name}", content=text.encode()).status_code == 201
        for name, text in texts.items():
            found = httpx2.get(place, params={"query": text, "top_k": 2}).json()["data"]
            assert (found[0]["id"], found[0]["snippet"]) == (name, text)
            assert found[0]["score"] == pytest.approx(1.0, abs=1e-5)
            body = {
                "messages": [{"role": "user", "content": text}],
                "documents": {"search": {"query": None, "top_k": 1}},
                "max_tokens": 2,
            }
            made = httpx2.post(f"{address}/v1/chat/completions", json=body).json()
            assert [one["name"] for one in made["usage"]["keyhole"]["documents"]] == [name]
        for name in texts:
            assert httpx2.delete(f"{place}/{name}").status_code == 200
        left = httpx2.get(place, params={"query": "lamp"}).json()["data"]
        assert not texts.keys() & {one["id"] for one in left}

"""/v1/documents, and questions over what is stored there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from keyhole import LLM, SamKV, SamplingParams

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
    body = {"text": "short", "pinned": True}
    assert httpx2.put(f"{place}/gone", json=body).json()["pinned"]
    assert httpx2.delete(f"{place}/gone").json() == {
        "id": "gone",
        "object": "document",
        "deleted": True,
    }
    for method in (httpx2.get, httpx2.delete):
        answer = method(f"{place}/gone")
        assert answer.status_code == 404
        assert "gone" in answer.json()["error"]["message"]


def test_a_name_is_no_path(address: str, llm: LLM) -> None:
    """Records are called by what they hold; a name stands in the index alone."""
    folder = Path(llm.documents.place).parent
    before = {path for path in folder.parent.rglob("*") if folder / "documents" not in path.parents}
    place = f"{address}/v1/documents/..%2F..%2Foutside"
    assert httpx2.put(place, content=b"x").json()["id"] == "../../outside"
    assert httpx2.delete(place).status_code == 200
    after = {path for path in folder.parent.rglob("*") if folder / "documents" not in path.parents}
    assert after == before


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
        ("a", {"content": b""}, "no text"),
        ("a%00b", {"content": b"x"}, "name"),
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
        ({"messages": [{"role": "system", "content": "x"}]}, "one message of text"),
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

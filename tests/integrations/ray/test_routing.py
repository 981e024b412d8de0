"""Requests that belong together have one key, and keys move only with their replica."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray has an environment of its own: make test-ray")

from keyhole.integrations.ray.routing import DOCUMENTS_KEY, ranked, routing_key

CHAT = "/v1/chat/completions"


def key(path: str = CHAT, **body: Any) -> str:
    return routing_key(path, json.dumps(body).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_all_turns_of_a_conversation_have_one_key() -> None:
    system = {"role": "system", "content": "be brief"}
    said = [system, user("hello"), {"role": "assistant", "content": "hi"}, user("and now?")]
    assert key(messages=said) == key(messages=said[:2])
    assert key(messages=said) != key(messages=[system, user("another")])


def test_the_same_documents_have_one_key_in_any_order() -> None:
    one = key(documents=["a", "b"], messages=[user("one question")])
    assert one == key(documents=["b", "a"], messages=[user("another question")])
    assert one != key(documents=["a"], messages=[user("one question")])


def test_a_client_may_say_what_belongs_together() -> None:
    one = key(prompt_cache_key="k", messages=[user("one")])
    assert one == key(prompt_cache_key="k", messages=[user("two")])


@pytest.mark.parametrize("long", ["x" * 300, [*range(100)], [[*range(100)]], ["x" * 300, "y"]])
def test_prompts_with_the_same_start_have_one_key(long: Any) -> None:
    longer = long + "end" if isinstance(long, str) else [*long, 7]
    assert key("/v1/completions", prompt=long) == key("/v1/completions", prompt=longer)
    assert key("/v1/completions", prompt=long) != key("/v1/completions", prompt="z" * 300)


def test_documents_are_stored_by_one_replica() -> None:
    assert routing_key("/v1/documents", b"") == DOCUMENTS_KEY
    assert routing_key("/v1/documents/a/b", b"text") == DOCUMENTS_KEY
    assert routing_key("/v1/documentsX", b"{}") == ""


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b'"x"', b'{"prompt": 3}', b'{"messages": []}'],
)
def test_what_is_no_request_is_for_any_replica(body: bytes) -> None:
    assert routing_key(CHAT, body) in {"", "start:null"}
    assert routing_key("/health", body) == ""


@pytest.mark.parametrize("odd", [["x", 3], [3, None], {"a": 1}, [None], [[]]])
def test_odd_prompts_have_some_key(odd: Any) -> None:
    for name in ("messages", "prompt", "input", "documents"):
        assert isinstance(key(**{name: odd}), str)


def test_keys_are_spread_and_only_those_of_a_replica_that_goes_move() -> None:
    replicas = ["one", "two", "three"]
    keys = [f"key {number}" for number in range(300)]
    before = {one: ranked(one, replicas) for one in keys}
    assert all(sorted(order) == sorted(replicas) for order in before.values())
    for name in replicas:
        assert 60 < sum(order[0] == name for order in before.values()) < 140
    for one, order in before.items():
        left = [name for name in order if name != "two"]
        assert ranked(one, ["three", "one"]) == left

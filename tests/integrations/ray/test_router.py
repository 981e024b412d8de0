"""The order in which replicas are tried."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray has an environment of its own: make test-ray")

from keyhole.integrations.ray.routing import DOCUMENTS_KEY, AffinityRouter, ranked

NAMES = ["one", "two", "three"]


def order(key: str, lengths: dict[str, int]) -> list[str]:
    """The order of the replicas, which have `lengths` requests each."""
    router: Any = AffinityRouter.__new__(AffinityRouter)
    router.initialize_state(overloaded=4)
    cache = SimpleNamespace(get=lambda one: lengths.get(one.unique_id))
    vars(router)["_replica_queue_len_cache"] = cache
    replicas: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in NAMES]
    request: Any = SimpleNamespace(args=[key], routing_context=SimpleNamespace())
    found = asyncio.run(router.choose_replicas(replicas, request))
    assert request.routing_context.should_backoff
    return [one.replica_id.unique_id for (one,) in found]


def test_a_key_has_its_replica_while_that_is_not_overloaded() -> None:
    first, second, third = ranked("key", NAMES)
    assert order("key", {}) == [first, second, third]
    assert order("key", {first: 3}) == [first, second, third]
    assert order("key", {first: 4, third: 1}) == [second, third, first]


def test_of_overloaded_replicas_the_one_with_the_fewest_requests_is_asked() -> None:
    first, second, third = ranked("key", NAMES)
    assert order("key", {first: 7, second: 6, third: 5}) == [third, second, first]


def test_documents_keep_their_replica_however_busy_it_is() -> None:
    first = ranked(DOCUMENTS_KEY, NAMES)[0]
    assert order(DOCUMENTS_KEY, {first: 100})[0] == first


def test_without_a_key_the_fewest_requests_decide() -> None:
    assert order("", {"one": 2, "two": 0, "three": 1}) == ["two", "three", "one"]

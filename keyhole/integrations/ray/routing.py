"""Routing: requests that can reuse each other's keys and values reach the same replica."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

#: Prompts with this start in common get the same key: long enough to distinguish conversations,
#: short enough for several questions about one text to share it.
_CHARACTERS = 256
_TOKENS = 64
#: Prefix of keys whose requests must reach the same replica, even if it is overloaded.
STRICT = "!"
#: Until a document is stored, only the replica that encodes it knows it.
DOCUMENTS_KEY = f"{STRICT}documents"


def routing_key(path: str, body: bytes) -> str:
    """The same key for requests that should reach the same replica; "" for any replica.

    From the request's documents, in any order; else the client's prompt_cache_key; else the start
    of the conversation, up to the user's first message, or of the prompt.
    """
    if path == "/v1/documents" or path.startswith("/v1/documents/"):
        return DOCUMENTS_KEY
    given = _object(body) if path.startswith("/v1/") else {}
    documents = given.get("documents")
    if isinstance(documents, list) and documents:
        return _key("documents", sorted(map(str, documents)))
    if isinstance(given.get("prompt_cache_key"), str):
        return _key("cache", given["prompt_cache_key"])
    for name in ("messages", "input", "prompt"):
        if given.get(name):
            return _key("start", _start(given[name]))
    return ""


def ranked(key: str, names: Iterable[str]) -> list[str]:
    """Replica names in order of their weight for a key (rendezvous hashing).

    When a replica is removed, only its keys move, each to the next replica in its order.
    """

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{key}\0{name}".encode("utf-8", "replace"), digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; empty if it is none, which the replica reports."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(kind: str, value: Any) -> str:
    return f"{kind}:{json.dumps(value, ensure_ascii=False)}"


def _start(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt[:_CHARACTERS]
    if not isinstance(prompt, Sequence) or not prompt:
        return None
    first = prompt[0]
    if isinstance(first, dict):
        return _opening(prompt)
    if isinstance(first, str | list):  # several prompts: the first one decides
        return _start(first)
    return list(prompt[:_TOKENS])


def _opening(messages: Sequence[Any]) -> str:
    """The messages up to the user's first one, which all turns of a conversation share."""
    opening = []
    for message in messages:
        if isinstance(message, dict):
            opening.append([message.get("role"), message.get("content")])
            if message.get("role") == "user":
                break
    return json.dumps(opening, ensure_ascii=False)[:_CHARACTERS]


class AffinityRouter(RequestRouter):
    """Chooses by rendezvous hashing of the key, the first argument of a call.

    Skips replicas with `overloaded` requests while another has fewer. If all are overloaded, or
    without a key, chooses the one with the fewest requests.
    """

    def initialize_state(self, overloaded: int) -> None:
        """overloaded: the number of requests from which a replica counts as overloaded."""
        self._overloaded = overloaded

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas in order of preference."""
        key = ""
        if pending_request is not None:
            # The result lists all replicas: when all are full, Serve waits before it retries.
            pending_request.routing_context.should_backoff = True
            key = str(pending_request.args[0]) if pending_request.args else ""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        if not key:
            free: list[Any] = []
            busy = random.sample([*by_name.values()], len(by_name))
        elif key.startswith(STRICT):
            free, busy = [by_name[name] for name in ranked(key, by_name)], []
        else:
            order = [by_name[name] for name in ranked(key, by_name)]
            free = [one for one in order if self._length(one) < self._overloaded]
            busy = [one for one in order if self._length(one) >= self._overloaded]
        return [[one] for one in (*free, *sorted(busy, key=self._length))]

    def _length(self, replica: RunningReplica) -> int:
        """The replica's number of requests that this process knows of."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

"""Which requests belong together: those that use the keys and values of earlier ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

#: What makes two prompts start alike: enough to tell conversations from each other, and no more
#: than what several questions about one text share.
_CHARACTERS = 256
_TOKENS = 64
#: Begins the key of requests that must reach the same replica, however busy it is.
STRICT = "!"
#: Documents on their way into the store are known to the replica that encodes them.
DOCUMENTS_KEY = f"{STRICT}documents"


def routing_key(path: str, body: bytes) -> str:
    """The same for requests that should reach the same replica; "" where any replica will do.

    By the documents of a request, in any order; else by the client's prompt_cache_key; else by the
    start of the conversation, up to its first message of the user, or of the prompt.
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
    """Names of replicas by their weight for a key, the first one first (rendezvous hashing).

    When a replica goes, only its keys move, and each to the next of its list.
    """

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{key}\0{name}".encode("utf-8", "replace"), digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; empty if it is none, and the replica says so."""
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
    if isinstance(first, str | list):  # several prompts: those of one request stay together
        return _start(first)
    return list(prompt[:_TOKENS])


def _opening(messages: Sequence[Any]) -> str:
    """The messages up to the user's first one, so that all turns of a conversation have it."""
    said = []
    for message in messages:
        if isinstance(message, dict):
            said.append([message.get("role"), message.get("content")])
            if message.get("role") == "user":
                break
    return json.dumps(said, ensure_ascii=False)[:_CHARACTERS]

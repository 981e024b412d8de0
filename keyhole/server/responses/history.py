"""Conversations that later requests continue, in memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from keyhole.server.errors import ApiError

_Message = dict[str, Any]
#: The most conversations that are kept, and the most messages of all together.
MOST_KEPT = 256
_MOST_CHARACTERS = 10_000_000


class History:
    """The messages up to a response, for the API key that asked for it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[str, int, list[_Message]]] = OrderedDict()
        self._size = 0

    def get(self, name: str | None, key: str) -> list[_Message]:
        """The messages; none without a name. ApiError 404 for an unknown one."""
        if name is None:
            return []
        found = self._kept.get(name)
        if found is None or found[0] != key:
            raise ApiError(
                404,
                f"response {name!r} was not found: it is too old, or was not stored",
                kind="not_found_error",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._kept.move_to_end(name)
        return found[2]

    def add(self, name: str, key: str, messages: list[_Message]) -> None:
        """Keeps the messages up to a response; the least recently used ones are dropped."""
        size = sum(len(str(message)) for message in messages)
        self._kept[name] = key, size, messages
        self._size += size
        while len(self._kept) > MOST_KEPT or (self._size > _MOST_CHARACTERS and self._kept):
            _, (_, gone, _) = self._kept.popitem(last=False)
            self._size -= gone

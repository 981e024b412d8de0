"""Conversations by `previous_response_id`: kept once, so that any replica can continue them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from keyhole.server.responses.history import MOST_KEPT, History

_Kept = tuple[str, list[dict[str, Any]]]


class Conversations:
    """A deployment of one replica without CPUs: the API key and messages up to each response."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def put(self, name: str, kept: _Kept) -> None:
        """Keeps a conversation; drops the oldest."""
        self._kept[name] = kept
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def get(self, name: str) -> _Kept | None:
        """The conversation, or None for an unknown response."""
        return self._kept.get(name)


class SharedHistory(History):
    """A replica's history; `unshared` has the entries that other replicas do not know yet."""

    def __init__(self) -> None:
        super().__init__()
        self.unshared: dict[str, _Kept] = {}

    def add(self, name: str, key: str, messages: list[dict[str, Any]]) -> None:
        """Adds an entry here and in `unshared`, from which the replica sends it to the others."""
        super().add(name, key, messages)
        self.unshared[name] = key, messages

    def learn(self, name: str, kept: _Kept) -> None:
        """Adds an entry from another replica."""
        super().add(name, *kept)

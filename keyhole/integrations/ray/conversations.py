"""What `previous_response_id` names: kept once, so that any replica can go on with it."""

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
        """Keeps them; the oldest go."""
        self._kept[name] = kept
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def get(self, name: str) -> _Kept | None:
        """None for a response that is not known."""
        return self._kept.get(name)


class SharedHistory(History):
    """A replica's own history, and what it has to tell the others."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, _Kept] = {}

    def add(self, name: str, key: str, messages: list[dict[str, Any]]) -> None:
        """As History's; until `told` is emptied the others do not know it."""
        super().add(name, key, messages)
        self.told[name] = key, messages

    def learn(self, name: str, kept: _Kept) -> None:
        """What another replica knows."""
        super().add(name, *kept)

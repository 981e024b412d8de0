"""Serve's request router: requests of one key go to one replica while it is not overloaded."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from keyhole.integrations.ray.routing import STRICT, ranked


class AffinityRouter(RequestRouter):
    """Chooses by rendezvous hashing of the key that is the first argument of a call.

    A replica with `overloaded` requests is passed over as long as another has fewer; of those, and
    without a key, the one with the fewest requests is taken.
    """

    def initialize_state(self, overloaded: int) -> None:
        """overloaded: requests that are more than a replica runs at once."""
        self._overloaded = overloaded

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which they should be asked."""
        key = ""
        if pending_request is not None:
            # All replicas are among those below: when none has room, Serve waits a little.
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
        """Requests of a replica, as far as this process knows."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

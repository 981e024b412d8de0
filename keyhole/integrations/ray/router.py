"""Serve's request router: requests with one key go to one replica unless it is overloaded."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from keyhole.integrations.ray.routing import STRICT, ranked


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

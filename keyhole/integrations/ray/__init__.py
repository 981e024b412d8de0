"""The server of `keyhole serve` over replicas on a Ray cluster, and batches over Ray Data.

    serve run keyhole.integrations.ray:app model=PLACE policy=delta num_replicas=auto

    settings       what `serve run` got, checked before anything starts
    start          `app`, which builds the deployments
    front          takes HTTP requests, sends each to a replica, retries what a dead one had
    routing        which requests belong together: those of the same documents or conversation
    router         Serve's request router: the same replica for them, unless it is overloaded
    replica        an engine and the application of `keyhole serve`
    conversations  what `previous_response_id` names, for all replicas
    exporter       the metrics of a replica in Ray's exporter
    batch          files of requests on an actor pool of Ray Data

Needs the extra `keyhole[ray]`.
"""

from keyhole.integrations.ray.start import app

__all__ = ["app"]

"""`keyhole serve` as replicas on a Ray cluster, and batches on Ray Data.

    serve run keyhole.integrations.ray:app model=PLACE policy=delta num_replicas=auto

    settings       the arguments of `serve run`, checked before anything starts
    start          `app`, which builds the deployments
    front          takes HTTP requests, sends each to a replica, retries those of a dead replica
    routing        the key of a request, and Serve's router: one replica per key, unless overloaded
    replica        an engine and the application of `keyhole serve`, its metrics through Ray, and
                   the conversations that `previous_response_id` refers to, for all replicas
    batch          files of requests on an actor pool of Ray Data

Needs the extra `keyhole[ray]`.
"""

from keyhole.integrations.ray.start import app

__all__ = ["app"]

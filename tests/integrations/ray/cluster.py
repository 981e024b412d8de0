"""A local Ray cluster on the loopback interface, and applications on it."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

#: Ray's name for a cluster that other machines reach; without it a node's address is 127.0.0.1.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve

from keyhole import LLM
from keyhole.integrations.ray import app
from keyhole.policies.base import Policy

PORT = 18355
#: As little as two replicas of small models need on a machine that others use too.
REPLICA = {"num_cpus": 0.2, "memory": "8MiB", "max_batch": 4}
_numbers = itertools.count()


@cache
def start() -> None:
    """Starts the cluster once; it ends with this process."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        logging_level="ERROR",
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})


@contextmanager
def application(**settings: Any) -> Iterator[str]:
    """The address of an application that lives as long as the block."""
    start()
    name = f"app-{next(_numbers)}"
    serve.run(app({**REPLICA, **settings}), name=name, route_prefix=f"/{name}")
    try:
        yield f"http://127.0.0.1:{PORT}/{name}"
    finally:
        serve.delete(name)


@contextmanager
def serving(llm: LLM, **settings: Any) -> Iterator[str]:
    """`tests.server.conftest.serving` on two replicas: the same model, engine and documents."""
    config = llm.engine.config
    given = {
        "model": llm.engine.model.network.config._name_or_path,
        "memory": config.memory,
        "max_batch": config.max_batch,
        "page_size": config.page_size,
        "policy": _as_given(llm.engine._given),
        "documents": llm._store[0],
        "num_replicas": 2,
        "num_cpus": 0.2,
    }
    with application(**{**given, **settings}) as address:
        yield address


def _as_given(policy: Policy) -> dict[str, Any]:
    """As a config file has it."""
    settings = {name: value for name, value in vars(policy).items() if value is not None}
    return {"name": policy.name, **settings}


def replica_pids() -> list[int]:
    """The processes of all replicas that have an engine."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = place.read_bytes()
        except OSError:  # it has ended
            continue
        if title.startswith(b"ray::ServeReplica:") and b":Replica" in title.split(b".")[0]:
            found.append(int(place.parent.name))
    return found


def kill(pid: int) -> None:
    """kill -9."""
    os.kill(pid, signal.SIGKILL)

"""`app`: builds the deployments from the arguments of `serve run` or a config file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from keyhole.config import EngineConfig
from keyhole.errors import KeyholeError
from keyhole.exactness_gate import require
from keyhole.integrations.ray.front import Front
from keyhole.integrations.ray.replica import Conversations, Replica, reason
from keyhole.integrations.ray.routing import AffinityRouter
from keyhole.integrations.ray.settings import RaySettings, read_settings
from keyhole.models import families
from keyhole.models.locate import locate
from keyhole.models.model_config import read_config
from keyhole.registry import require_depth

#: Far more than a machine's connections: the replicas have limits, the front only forwards.
_MANY = 100_000
#: Limited, because a model that cannot be loaded will fail again.
_STARTS = 2
#: Ray's settings in the processes of the deployments. With one event loop for Serve and for our
#: code, messages do not pass from thread to thread. Bodies may exceed gRPC's limit of 4 MiB.
_ENVIRONMENT = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
}


class StartError(click.ClickException, KeyholeError):
    """An error of the application: `serve run` prints one line and exits with status 1."""


def app(args: dict[str, Any]) -> Application:
    """The Serve application; args: names and values of `settings.known_settings`."""
    try:
        settings = read_settings(args)
        check_model(settings.model, args.get("policy"))
    except KeyholeError as error:
        raise StartError(str(error)) from error
    context = click.get_current_context(silent=True)
    if context is not None:
        context.with_resource(_failed_start())
    return build(settings)


def build(settings: RaySettings) -> Application:
    """The deployments: the front, the replicas, and the conversations they share."""
    config, server = EngineConfig(**settings.engine), settings.server_config()
    small = {"ray_actor_options": with_environment({"num_cpus": 0}), "max_ongoing_requests": _MANY}
    conversations = serve.deployment(Conversations).options(name="Conversations", **small)
    options = dict(settings.deployment)
    options["ray_actor_options"] = with_environment(options["ray_actor_options"])
    replicas = serve.deployment(Replica).options(
        name="Replica",
        max_queued_requests=server.max_queue,
        max_constructor_retry_count=_STARTS,
        graceful_shutdown_timeout_s=server.drain_timeout,
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRouter,
            request_router_kwargs={"overloaded": config.max_batch},
        ),
        **options,
    )
    front = serve.deployment(serve.ingress()(Front)).options(name="Front", **small)
    answering = replicas.bind(settings, conversations.bind())
    return front.bind(answering, server.max_body)


def with_environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an actor with Keyhole's environment variables, unless they set these."""
    runtime = options.get("runtime_env", {})
    variables = {**_ENVIRONMENT, **runtime.get("env_vars", {})}
    return {**options, "runtime_env": {**runtime, "env_vars": variables}}


def check_model(model: str, policy: Any) -> None:
    """Raises ConfigError or ModelError for a model that its config shows to be unsupported.

    policy: as given; a settings file is valid only for models of its depth.
    """
    config = read_config(locate(model))
    families.check(config, model)
    require(config, model)
    require_depth(policy, len(families.layouts(config)))


@contextmanager
def _failed_start() -> Iterator[None]:
    """If replicas cannot start, ends with one line and status 1; `serve run` alone exits with 0."""
    try:
        yield
    except SystemExit as end:
        cause = end.__context__
        if not isinstance(cause, Exception):  # Ctrl-C, or a signal
            raise
        click.echo(f"Error: {reason() or cause}", err=True)
        raise SystemExit(1) from None

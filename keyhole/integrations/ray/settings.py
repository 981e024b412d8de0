"""The settings of `serve run keyhole.integrations.ray:app NAME=VALUE ...`, checked first."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from keyhole.config import (
    EngineConfig,
    help_of,
    is_count,
    is_size,
    parse_bytes,
    read_setting,
    require_known,
)
from keyhole.errors import ConfigError
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from keyhole.server.settings import ServerConfig

_KEYS = "KEYHOLE_API_KEYS"
#: Settings of the server that Ray replaces, and what to set instead.
_RAYS = {
    "host": "Serve's http_options (serve start --http-host, or the config file)",
    "port": "Serve's http_options (serve start --http-port, or the config file)",
}
_MODEL = {
    "model": "folder, hub id, or tiny, the bundled demonstration model",
    "policy": "what a decode step reads, such as delta:token_budget=1024",
    "device": "auto, cpu, cuda or cuda:0",
    "dtype": "auto, float32, bfloat16 or float16",
    "adapters": "LoRA adapters that requests may choose, NAME=FOLDER,NAME=FOLDER or a mapping",
    "documents": "folder or URL of stored documents, which every replica reaches",
    "documents_limit": "size limit of the store, such as 20GiB",
}
_ACTOR = {
    "num_cpus": "CPUs per replica, and its number of threads",
    "num_gpus": "GPUs per replica, which may be a fraction",
}
_AUTOSCALING = {
    "min_replicas": "smallest number with num_replicas=auto",
    "max_replicas": "largest number with num_replicas=auto",
    "target_ongoing_requests": "requests per replica above which replicas are added; max_batch",
}
_DEPLOYMENT = {
    "autoscaling_config": "Serve's other settings of num_replicas=auto, such as upscale_delay_s",
    "num_replicas": "a number, or auto: as many as the requests need",
    "ray_actor_options": "other options of a replica's actor, such as resources or runtime_env",
    "placement_group_bundles": "resources of each replica",
    "placement_group_strategy": "PACK, SPREAD, STRICT_PACK or STRICT_SPREAD",
    "max_replicas_per_node": "largest number on one machine",
    "max_ongoing_requests": "requests that a replica accepts at once; twice max_batch",
}


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """A checked application.

    model to engine: arguments of `LLM`. server: as for `keyhole serve`. deployment: options of
    Serve's deployment of replicas.
    """

    model: str = "tiny"
    policy: Policy | None = None
    device: str = "auto"
    dtype: str = "auto"
    adapters: dict[str, str] | None = None
    documents: str | None = None
    documents_limit: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    deployment: dict[str, Any] = field(default_factory=dict)

    def server_config(self) -> ServerConfig:
        """The server's settings with the API keys of the environment, which are never listed."""
        given = os.environ.get(_KEYS, "").split(",")
        keys = (*self.server.get("api_key", ()), *(key.strip() for key in given if key.strip()))
        return ServerConfig(**{**self.server, "api_key": keys})


def read_settings(given: Mapping[str, Any]) -> RaySettings:
    """Settings from names and values: strings of a command line, or values of a config file.

    ConfigError for an unknown name or an invalid value.
    """
    engine = {one.name: one for one in dataclasses.fields(EngineConfig)}
    server = {one.name: one for one in dataclasses.fields(ServerConfig) if one.name not in _RAYS}
    for name in given:
        _check_name(name, [*known_settings()])
    found = RaySettings(
        **_texts(given),
        policy=_policy(given.get("policy")),
        adapters=_adapters(given.get("adapters")),
        documents=None if given.get("documents") is None else str(given["documents"]),
        documents_limit=_size(given.get("documents_limit")),
        engine={name: _typed(engine[name], given[name]) for name in engine if name in given},
        server={name: _typed(server[name], given[name]) for name in server if name in given},
    )
    config = EngineConfig(**found.engine)
    found.server_config()
    return dataclasses.replace(found, deployment=_deployment(given, config))


def known_settings() -> dict[str, str]:
    """Every name, with its help."""
    fields = [*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)]
    ours = {one.name: help_of(one) for one in fields if one.name not in _RAYS}
    return {**_MODEL, **ours, **_DEPLOYMENT, **_AUTOSCALING, **_ACTOR}


def _texts(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(given[name]) for name in ("model", "device", "dtype") if name in given}


def _check_name(name: str, known: list[str]) -> None:
    if name in _RAYS:
        raise ConfigError(f"{name} is a setting of Ray Serve; set it in {_RAYS[name]}")
    require_known("setting", name, known)


def _policy(given: Any) -> Policy | None:
    if not isinstance(given, Mapping):
        return None if given is None else make_policy(given)
    settings = dict(given)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"policy {dict(given)!r} must have a name, such as delta")
    return make_policy(name, settings)


def _adapters(given: Any) -> dict[str, str] | None:
    if given is None or isinstance(given, Mapping):
        return None if given is None else {str(name): str(given[name]) for name in given}
    found = dict(one.split("=", 1) for one in str(given).split(",") if "=" in one)
    if len(found) != len(str(given).split(",")):
        raise ConfigError(f"adapters {given!r} must be NAME=FOLDER,NAME=FOLDER, each name once")
    return found


def _size(given: Any) -> int | None:
    return None if given is None else parse_bytes(given, "documents_limit")


def _typed(one: dataclasses.Field[Any], given: Any) -> Any:
    if one.type == "tuple[str, ...]":
        return (given,) if isinstance(given, str) else tuple(given)
    if is_size(one) and given is not None:
        return parse_bytes(given, one.name)
    return read_setting(one, given, one.name) if isinstance(given, str) else given


def _deployment(given: Mapping[str, Any], config: EngineConfig) -> dict[str, Any]:
    """Options of the replicas' deployment; Ray checks those that are passed through."""
    values = {
        name: _value(name, given[name])
        for name in {**_DEPLOYMENT, **_AUTOSCALING, **_ACTOR}
        if name in given
    }
    count = values.pop("num_replicas", 1)
    if count != "auto" and not is_count(count):
        raise ConfigError(f"num_replicas {count!r} must be auto, or a number of at least 1")
    scaling = {name: values.pop(name) for name in _AUTOSCALING if name in values}
    options = dict(values.pop("ray_actor_options", {}))
    options |= {name: values.pop(name) for name in _ACTOR if name in values}
    values.setdefault("max_ongoing_requests", 2 * config.max_batch)
    scaling = {**values.pop("autoscaling_config", {}), **scaling}
    if count == "auto":
        scaling.setdefault("target_ongoing_requests", config.max_batch)
        values["autoscaling_config"] = scaling
    elif scaling:
        raise ConfigError(f"{next(iter(scaling))} needs num_replicas=auto, not {count}")
    else:
        values["num_replicas"] = count
    return {**values, "ray_actor_options": options}


def _value(name: str, given: Any) -> Any:
    """The value of an option of Ray; a string is parsed as YAML."""
    try:
        value = yaml.safe_load(given) if isinstance(given, str) else given
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} {given!r} must be a value in YAML or JSON") from error
    if name in _ACTOR or name == "target_ongoing_requests":
        good = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        right = "a number of at least 0"
    elif name in {"min_replicas", "max_replicas", "max_replicas_per_node", "max_ongoing_requests"}:
        good, right = is_count(value, 0 if name == "min_replicas" else 1), "a whole number"
    elif name in {"ray_actor_options", "autoscaling_config"}:
        good, right = isinstance(value, dict), "a mapping, such as {name: 1}"
    else:
        return value
    if not good:
        raise ConfigError(f"{name} {given!r} must be {right}")
    return value

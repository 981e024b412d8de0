"""A replica: an engine, the application of `keyhole serve` without its socket, and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import ExitStack
from typing import Any

from prometheus_client import CollectorRegistry
from ray.experimental import internal_kv
from ray.serve.handle import DeploymentHandle
from ray.serve.metrics import Gauge

from keyhole.async_llm import AsyncLLM
from keyhole.errors import ConfigError, KeyholeError
from keyhole.integrations.ray.settings import RaySettings
from keyhole.llm import LLM
from keyhole.server import logs
from keyhole.server.app import create_app, whole_body
from keyhole.server.run import SWITCH_S
from keyhole.server.state import MOST_KEPT, History, State

#: A message of the application: {"type": "http.response.start", ...} or a part of the body.
AsgiMessage = MutableMapping[str, Any]

_RESPONSES = "/v1/responses"
_REASON = b"keyhole:failed_start"


def make_llm(settings: RaySettings) -> LLM:
    """The engine of the settings; ConfigError if all stored documents belong to other models."""
    llm = LLM(
        settings.model,
        settings.policy,
        device=settings.device,
        dtype=settings.dtype,
        adapters=settings.adapters,
        documents=settings.documents,
        documents_limit=settings.documents_limit,
        **settings.engine,
    )
    if settings.documents is not None:
        infos = llm.documents.list()
        if infos and not any(info.encoded for info in infos):
            raise ConfigError(
                f"none of the {len(infos)} documents at {settings.documents!r} was encoded by "
                f"{settings.model!r}; give this model a store of its own, or encode them again "
                "with it"
            )
    return llm


def tell_driver(error: KeyholeError) -> None:
    """Stores why a replica cannot start, for `reason`; Serve's own message does not say it."""
    internal_kv._internal_kv_put(_REASON, str(error).encode())


def reason() -> str | None:
    """Why a replica of this cluster could not start."""
    found = internal_kv._internal_kv_get(_REASON)
    return None if found is None else str(found, "utf-8")


class Replica:
    """Answers the front's requests. conversations: the deployment that keeps them."""

    def __init__(self, settings: RaySettings, conversations: DeploymentHandle[Any]) -> None:
        self._exporting: asyncio.Future[None] | None = None
        self._log = ExitStack()
        try:
            llm = make_llm(settings)
        except KeyholeError as error:
            tell_driver(error)
            raise
        sys.setswitchinterval(SWITCH_S)
        config = settings.server_config()
        self._log.enter_context(logs.configured(config.log_format))  # Ray keeps what it writes
        served = AsyncLLM(llm, stream_interval=config.stream_interval)
        self._app = create_app(served, config)
        self._state: State = self._app.state.keyhole
        self._history = self._state.history = SharedHistory()
        self._conversations = conversations
        self._exporting = asyncio.ensure_future(export(self._state.metrics.registry))

    def __del__(self) -> None:
        if self._exporting is not None:  # None if the engine could not start
            self._exporting.cancel()
        self._log.close()

    async def answer(
        self, key: str, scope: dict[str, Any], body: bytes
    ) -> AsyncGenerator[list[AsgiMessage], None]:
        """Yields the application's messages for one request, in lists of those that are ready.

        key: only for the router. When the caller disconnects, the request is aborted within a step.
        """
        if scope["path"] == _RESPONSES:
            await self._recall(body)
        messages: asyncio.Queue[AsgiMessage | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._run(scope, body, messages))
        try:
            while (message := await messages.get()) is not None:
                ready = [message]
                while not messages.empty() and (message := messages.get_nowait()) is not None:
                    ready.append(message)
                if _is_last(ready[-1]):
                    await self._tell()
                yield ready
                if message is None:
                    break
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(
        self, scope: dict[str, Any], body: bytes, messages: asyncio.Queue[AsgiMessage | None]
    ) -> None:
        async def send(message: AsgiMessage) -> None:
            messages.put_nowait(message)

        try:
            await self._app(scope, whole_body(body), send)  # a disconnect cancels this task
        finally:
            messages.put_nowait(None)

    async def _recall(self, body: bytes) -> None:
        """Fetches the conversation that a body continues, if it ran on another replica."""
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            return
        name = given.get("previous_response_id") if isinstance(given, dict) else None
        if isinstance(name, str):
            kept = await self._conversations.get.remote(name)
            if kept is not None:
                self._history.learn(name, kept)

    async def _tell(self) -> None:
        """Shares new responses with the other replicas before the clients receive them."""
        while self._history.unshared:
            name, kept = self._history.unshared.popitem()
            await self._conversations.put.remote(name, kept)


def _is_last(message: AsgiMessage) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


logger = logging.getLogger("keyhole.server")

#: The interval at which Ray reports metrics.
_SECONDS = 5.0


async def export(registry: CollectorRegistry) -> None:
    """Copies the server's metrics to Ray periodically, under their names with the prefix `ray_`.

    Serve adds the labels deployment, replica and application.
    """
    gauges: dict[str, Gauge] = {}
    while True:
        try:
            await _copy(registry, gauges)
        except Exception:  # metrics must not stop the replica; the next round may succeed
            logger.exception("metrics were not exported")
        await asyncio.sleep(_SECONDS)


async def _copy(registry: CollectorRegistry, gauges: dict[str, Gauge]) -> None:
    for family in await asyncio.to_thread(lambda: [*registry.collect()]):
        for sample in family.samples:
            if sample.name not in gauges:
                # A gauge for all kinds: Ray would rename counters.
                keys = tuple(sample.labels)
                gauges[sample.name] = Gauge(sample.name, family.documentation, tag_keys=keys)
            gauges[sample.name].set(sample.value, tags=dict(sample.labels))


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

"""State shared by all requests of a server."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from fastapi import Request

from keyhole.async_llm import AsyncLLM
from keyhole.documents.embeddings import EmbeddingSearch, SentenceEncoder
from keyhole.documents.search import BM25, Retriever
from keyhole.engine.documents.library import Documents
from keyhole.engine.sequence import Result
from keyhole.errors import ConfigError, KeyholeError
from keyhole.server import logs
from keyhole.server.documents.queue import DocumentQueue
from keyhole.server.errors import ApiError, draining, queue_full
from keyhole.server.metrics import DocumentGauges, DocumentState, Metrics
from keyhole.server.settings import ServerConfig

_Any = TypeVar("_Any")
_Message = dict[str, Any]
#: The most conversations that are kept, and the most messages of all together.
MOST_KEPT = 256
_MOST_CHARACTERS = 10_000_000


class Admission:
    """Counts running completions; those beyond the limit are refused at once.

    answering: requests of any kind that have no complete answer yet.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.running = self.answering = 0
        self.is_draining = False

    @property
    def is_idle(self) -> bool:
        """Whether no client waits for an answer, which a drain lets finish."""
        return not self.answering

    @contextmanager
    def answer(self) -> Iterator[None]:
        """Counts a request until it is answered."""
        self.answering += 1
        try:
            yield
        finally:
            self.answering -= 1

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Counts `count` completions as running; ApiError 429 if too many, 503 while draining.

        400 for more than ever fit, which clients would ask for again and again after a 429.
        """
        self.require_open()
        if count > self._limit:
            raise ApiError(
                400,
                f"the request asks for {count} completions, but at most {self._limit} may run or "
                "wait here; ask for fewer, or raise --max-queue",
                param="n",
            )
        if self.running + count > self._limit:
            raise queue_full(
                f"{self.running} completions are running or waiting, and the limit is "
                f"{self._limit}; try again later"
            )
        self.running += count
        try:
            yield
        finally:
            self.running -= count

    def require_open(self) -> None:
        """ApiError 503 while draining."""
        if self.is_draining:
            raise draining()


class History:
    """Conversations that later requests continue: the messages up to a response, for the API key
    that asked for it.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[str, int, list[_Message]]] = OrderedDict()
        self._size = 0

    def get(self, name: str | None, key: str) -> list[_Message]:
        """The messages; none without a name. ApiError 404 for an unknown one."""
        if name is None:
            return []
        found = self._kept.get(name)
        if found is None or found[0] != key:
            raise ApiError(
                404,
                f"response {name!r} was not found: it is too old, or was not stored",
                kind="not_found_error",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._kept.move_to_end(name)
        return found[2]

    def add(self, name: str, key: str, messages: list[_Message]) -> None:
        """Keeps the messages up to a response; the least recently used ones are dropped."""
        size = sum(len(str(message)) for message in messages)
        _, before, _ = self._kept.pop(name, ("", 0, []))
        self._kept[name] = key, size, messages
        self._size += size - before
        while len(self._kept) > MOST_KEPT or (self._size > _MOST_CHARACTERS and self._kept):
            _, (_, gone, _) = self._kept.popitem(last=False)
            self._size -= gone


@dataclass
class State:
    """The engine behind the server, its limits and its counters.

    llm: its `llm.llm` may be a copy of one in another process: read only its settings. traces:
    None: no traces; a custom server may set it. storing: held while a document is accepted.
    """

    llm: AsyncLLM
    config: ServerConfig
    admission: Admission = field(init=False)
    metrics: Metrics = field(init=False)
    history: History = field(default_factory=History, init=False)
    traces: logs.Traces | None = field(init=False)
    encoder: SentenceEncoder | None = field(init=False)
    storing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        engine = self.llm.llm.engine
        if self.name in engine.model.adapters.digests:
            raise ConfigError(
                f"adapter {self.name!r} has the same name as the served model, so no request could "
                "choose it; give it another name, or set served_model_name"
            )
        self.admission = Admission(self.config.max_queue + engine.config.max_batch)
        self.metrics = Metrics(engine.max_pages, self.llm.load, lambda: self.admission.running)
        self.metrics.registry.register(DocumentGauges(self._document_state))
        endpoint = self.config.otlp_endpoint
        folder = self.config.embeddings
        self.encoder = None if folder is None else SentenceEncoder(folder)
        self.traces = None if endpoint is None else logs.Traces(logs.make_provider(endpoint))

    @property
    def documents(self) -> Documents:
        """The stored documents; ConfigError for a model that does not support them."""
        return self.llm.documents

    @cached_property
    def retriever(self) -> Retriever:
        """Finds documents by words or, with an encoder, by meaning."""
        folder = self.documents.store.folder
        found: Retriever = BM25(folder / "search.sqlite")
        if self.encoder is not None:
            found = EmbeddingSearch(folder / "embeddings.sqlite", self.encoder)
        return self._first("retriever", found)

    @cached_property
    def encoding(self) -> DocumentQueue:
        """The queue of documents to be stored."""
        found = DocumentQueue(self.documents, self.config.max_queue, lambda _: self.update_search())
        return self._first("encoding", found)

    def _first(self, name: str, found: _Any) -> _Any:
        """The value that a thread made first: since Python 3.12 several may make one at once."""
        first: _Any = vars(self).setdefault(name, found)
        return first

    def end_encoding(self) -> None:
        """Closes the queue of documents, if there is one."""
        if "encoding" in vars(self):  # making one may read all weights
            self.encoding.close()

    def update_search(self) -> None:
        """Updates the search index to the stored documents."""
        self.documents.update_search(self.retriever)

    def _document_state(self) -> DocumentState | None:
        try:
            sizes = {info.name: info.size_bytes for info in self.documents.list()}
            return sizes, [job.status for job in self.encoding.jobs().values()]
        except KeyholeError:  # the model does not support documents, or the store is unreadable
            return None

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.config.served_model_name or str(self.llm.llm.engine.model.name)

    @property
    def tokenizer(self) -> Any:
        """The model's, None if it has none."""
        return self.llm.llm.tokenizer

    @property
    def most_tokens(self) -> int:
        """The most new tokens of a request without a limit: as many as the model takes."""
        return int(self.llm.llm.engine.max_length)

    def asked(self, prompt: Any) -> None:
        """Records a prompt for the log, if prompts are logged."""
        if self.config.log_prompts:
            logs.asked(prompt)

    def finished(self, result: Result) -> None:
        """Counts a completion and records it for the log."""
        self.metrics.finished(result)
        logs.finished(result)

    @property
    def names(self) -> list[str]:
        """The names in /v1/models: the model's, and those of its LoRA adapters."""
        return [self.name, *self.llm.llm.engine.model.adapters.digests]

    def adapter(self, name: str | None) -> str | None:
        """The LoRA adapter of a model's name; ApiError 404 for a model that is not served."""
        if name is None or name == self.name:
            return None
        if name not in self.names:
            raise ApiError(
                404,
                f"model {name!r} is not served here; use {' or '.join(map(repr, self.names))}",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        return name

    def check_count(self, count: int) -> None:
        """ApiError for more completions at once than the server allows."""
        most = self.config.max_completions
        if count > most:
            raise ApiError(
                400,
                f"the request asks for {count} completions, but at most {most} are allowed",
                param="n",
            )

    def timeout(self, asked: float | None) -> float | None:
        """Seconds that a request may take; None: no limit."""
        limits = [limit for limit in (asked, self.config.timeout) if limit is not None]
        return min(limits, default=None)


def state_of(request: Request) -> State:
    """The state of the server that received this request."""
    state: State = request.app.state.keyhole
    return state

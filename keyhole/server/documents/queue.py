"""Encodes documents one after another in a background thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from keyhole.documents.store import DocumentInfo
from keyhole.engine.documents.library import Documents
from keyhole.server.errors import ApiError, api_error, draining, queue_full

logger = logging.getLogger("keyhole.server")

#: How many of the newest failures are remembered.
_MOST_FAILED = 256


@dataclass(eq=False, kw_only=True)
class Job:
    """A document to be stored. status: "queued", "encoding", "ready" or "failed"."""

    name: str
    text: str
    overwrite: bool
    pinned: bool | None
    metadata: Mapping[str, Any] | None = None
    status: str = "queued"
    done: int = 0
    tokens: int | None = None
    cancelled_by: ApiError | None = None
    result: Future[DocumentInfo] = field(default_factory=Future)

    @property
    def progress(self) -> float:
        """The share of its tokens encoded so far."""
        return self.done / self.tokens if self.tokens else 0.0

    def report(self, done: int, tokens: int) -> None:
        """Called during encoding; raises the error that stops it."""
        self.done, self.tokens = done, tokens
        if self.cancelled_by is not None:
            raise self.cancelled_by


class DocumentQueue:
    """Jobs in order of arrival.

    limit: jobs that may wait. ready: called with each stored document.
    """

    def __init__(
        self, documents: Documents, limit: int, ready: Callable[[DocumentInfo], None]
    ) -> None:
        self._documents = documents
        self._limit = limit
        self._ready = ready
        self._guard = threading.Lock()  # for the fields below
        self._jobs: deque[Job] = deque()  # the first one is being encoded
        self._failed: dict[str, Job] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, job: Job) -> None:
        """Adds a job; ApiError 429 if too many wait, 503 once closed."""
        with self._guard:
            if self._is_closed:
                raise draining()
            if len(self._jobs) > self._limit:
                raise queue_full(
                    f"the queue for documents is full (limit {self._limit}); try again later"
                )
            self._failed.pop(job.name, None)
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="documents", daemon=True)
                self._thread.start()

    def get(self, name: str) -> Job | None:
        """The newest job of this name that is unfinished or failed."""
        with self._guard:
            waiting = (job for job in reversed(self._jobs) if job.name == name)
            return next(waiting, None) or self._failed.get(name)

    def jobs(self) -> dict[str, Job]:
        """All such jobs, by name."""
        with self._guard:
            return {**self._failed, **{job.name: job for job in self._jobs}}

    def cancel(self, name: str) -> bool:
        """Cancels the jobs of this name and waits for that; forgets a failure. True if any."""
        removed = ApiError(409, f"document {name!r} was removed before it was ready", param="name")
        was_queued = self._cancel(lambda job: job.name == name, removed)
        with self._guard:
            was_failed = self._failed.pop(name, None) is not None
        return was_queued or was_failed

    def forget(self, job: Job) -> None:
        """Forgets a failure, unless a newer job of this name has one."""
        with self._guard:
            if self._failed.get(job.name) is job:
                del self._failed[job.name]

    def close(self) -> None:
        """Cancels all jobs and waits for that; takes no more."""
        with self._guard:
            self._is_closed = True
        self._cancel(lambda _: True, draining())

    def _cancel(self, ends: Callable[[Job], bool], error: ApiError) -> bool:
        """Ends these jobs with an error; waits, for a chunk, if one is being encoded."""
        with self._guard:
            ended = [job for job in self._jobs if ends(job)]
            encoding = ended[0] if ended and ended[0] is self._jobs[0] else None
            for job in ended:
                job.cancelled_by = error
                if job is not encoding:
                    self._jobs.remove(job)
                    job.status = "failed"
        for job in ended:
            if job is not encoding:
                job.result.set_exception(error)
        if encoding is not None:
            encoding.result.exception()
        return bool(ended)

    def _run(self) -> None:
        while True:
            with self._guard:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs[0]
            try:
                info = self._encode(job)
            except Exception as error:  # noqa: BLE001 - reported in the job's status
                self._fail(job, error)
            else:
                with self._guard:
                    self._jobs.popleft()
                    job.status = "ready"
                job.result.set_result(info)

    def _encode(self, job: Job) -> DocumentInfo:
        job.report(0, 0)
        job.status = "encoding"
        info = self._documents.add(
            job.name,
            job.text,
            overwrite=job.overwrite,
            pinned=job.pinned,
            metadata=job.metadata,
            progress=job.report,
        )
        try:
            self._ready(info)
        except Exception:  # the document is stored nevertheless
            logger.exception("a stored document cannot be searched yet")
        return info

    def _fail(self, job: Job, error: Exception) -> None:
        failure = api_error(error)
        if failure.status == 500:
            logger.error("a document could not be encoded", exc_info=error)
        with self._guard:
            self._jobs.popleft()
            job.status = "failed"
            if job.cancelled_by is None:
                self._failed[job.name] = job
                while len(self._failed) > _MOST_FAILED:
                    del self._failed[next(iter(self._failed))]
        job.result.set_exception(failure)

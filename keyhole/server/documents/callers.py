"""The owner of each document, so that callers have a limit on how many they store.

An API key identifies a caller; without keys all callers are one. The digest of the key is stored
in the metadata of a document and hidden from clients.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any

from fastapi import Request

from keyhole.documents.source import metadata_text
from keyhole.errors import KeyholeError
from keyhole.server.documents.queue import Job
from keyhole.server.errors import ApiError
from keyhole.server.gate import bearer
from keyhole.server.state import State

_MARK = "keyhole_caller"
_DIGITS = 16


def caller_of(request: Request, state: State) -> str:
    """The caller's name; "" without keys."""
    if not state.config.api_key:
        return ""
    return hashlib.sha256(bearer(request.headers)).hexdigest()[:_DIGITS]


def marked(metadata: Mapping[str, Any] | None, caller: str) -> dict[str, Any] | None:
    """Metadata with the caller; ApiError if the client sends this field itself."""
    if metadata is not None and _MARK in metadata:
        raise ApiError(400, f"metadata may not have the name {_MARK!r}", param="metadata")
    if not caller:
        return None if metadata is None else dict(metadata)
    return {**(metadata or {}), _MARK: caller}


def unmarked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as the client gave it."""
    return {name: value for name, value in metadata.items() if name != _MARK}


async def enqueue(state: State, job: Job, metadata: Mapping[str, Any] | None, caller: str) -> None:
    """Adds a job with the client's metadata; ApiError 403 if the caller has too many documents."""
    job.metadata = marked(metadata, caller)
    if job.metadata is not None:
        metadata_text(job.metadata)
    most = state.config.max_documents
    async with state.storing:  # no other request may use up the limit meanwhile
        # Jobs first: one that ends meanwhile is counted as stored.
        waiting = state.encoding.jobs().values()
        stored = {one.name: one for one in await asyncio.to_thread(state.documents.list)}
        owned = {name for name, info in stored.items() if _owner(info.metadata) == caller}
        owned |= {
            one.name for one in waiting if one.status != "failed" and _owner(one.metadata) == caller
        }
        if len(owned | {job.name}) > most:
            raise ApiError(
                403,
                f"{len(owned)} documents are stored and at most {most} may be by one caller; "
                "remove some",
                kind="permission_error",
                code="too_many_documents",
            )
        known = stored.get(job.name) if caller and metadata is None else None
        if known is not None and await asyncio.to_thread(_has_text, state, job):
            job.metadata = marked(unmarked(known.metadata), caller)  # keeps its metadata
        state.encoding.add(job)


def _owner(metadata: Mapping[str, Any] | None) -> str:
    return str((metadata or {}).get(_MARK, ""))


def _has_text(state: State, job: Job) -> bool:
    try:
        return state.documents.store.source(job.name) == job.text
    except KeyholeError:  # removed meanwhile, or damaged
        return False

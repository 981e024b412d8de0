"""/v1/documents: store, list, search, look up and remove documents."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, File, Form, Query, Request, Response, UploadFile
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from keyhole.documents.search import Found
from keyhole.documents.source import check_name, metadata_text
from keyhole.documents.store import DocumentInfo
from keyhole.errors import KeyholeError, UnknownNameError
from keyhole.server.bodies import DocumentBody
from keyhole.server.documents.convert import decoded, text_of
from keyhole.server.documents.queue import Job
from keyhole.server.errors import ApiError, concerning, invalid
from keyhole.server.gate import bearer
from keyhole.server.state import State, state_of

logger = logging.getLogger("keyhole.server")


def _opened(request: Request) -> None:
    """Opens the store, in a thread of FastAPI's: the first time it may read from a URL."""
    _ = state_of(request).encoding


router = APIRouter(prefix="/v1/documents", dependencies=[Depends(_opened)])

_JSON, _TEXT = {"schema": DocumentBody.model_json_schema()}, {"schema": {"type": "string"}}
#: The body is read unparsed, so FastAPI cannot describe it.
_PUT = {
    "requestBody": {
        "required": True,
        "content": {"application/json": _JSON, "text/plain": _TEXT},
    }
}
#: Statuses of a stored document.
_STORED: dict[str, Any] = {
    "status_code": 201,
    "responses": {202: {"description": "accepted, to be encoded later: `wait` was false"}},
}
_NOT_ENCODED = "it was encoded by another model only; store it again"
_EVICTED = "its record was evicted; store it again"


@router.put("/{name:path}", openapi_extra=_PUT, **_STORED)
async def put(name: str, request: Request, wait: bool = True) -> Response:
    """Stores a text: the body itself, or JSON with "text"."""
    raw = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/json":
        return await _store(request, name, DocumentBody(text=decoded(raw)), wait=wait)
    try:
        body = DocumentBody.model_validate_json(raw)
    except ValidationError as error:
        raise invalid(error) from error
    body.check_others()
    return await _store(request, name, body, wait=wait)


@router.post("", **_STORED)
async def post(
    request: Request,
    file: Annotated[UploadFile, File()],
    name: Annotated[str | None, Form()] = None,
    metadata: Annotated[str | None, Form()] = None,
    overwrite: Annotated[bool, Form()] = True,
    pinned: Annotated[bool | None, Form()] = None,
    wait: bool = True,
) -> Response:
    """Stores a file: text, Markdown, HTML, PDF or DOCX. name: by default that of the file."""
    filename = file.filename or ""
    if len((await request.form()).getlist("file")) > 1:
        raise ApiError(
            400, "only one file per request; send each in a request of its own", param="file"
        )
    try:
        described = None if metadata is None else json.loads(metadata)
    except ValueError as error:
        raise ApiError(400, f"metadata is not JSON: {error}", param="metadata") from error
    if described is not None and not isinstance(described, dict):
        raise ApiError(400, f"metadata {metadata!r} must be a JSON object", param="metadata")
    text = await asyncio.to_thread(text_of, filename, await file.read())
    body = DocumentBody(text=text, overwrite=overwrite, pinned=pinned, metadata=described)
    return await _store(request, filename if name is None else name, body, wait=wait)


@router.get("")
async def listed(
    request: Request, query: str | None = None, top_k: Annotated[int, Query(ge=1, le=100)] = 8
) -> Response:
    """All documents, by name; with a query those that match, best first."""
    state = state_of(request)
    infos = {info.name: info for info in await asyncio.to_thread(state.documents.list)}
    jobs = state.encoding.jobs()
    if query is None:
        data = [_shown(n, infos.get(n), jobs.get(n)) for n in sorted(infos.keys() | jobs.keys())]
        return JSONResponse({"object": "list", "data": data})
    found = await search(state, query, top_k)
    data = [
        {**_shown(one.name, infos[one.name], jobs.get(one.name)), "score": one.score}
        | {"snippet": one.snippet}
        for one in found
        if one.name in infos
    ]
    return JSONResponse({"object": "list", "data": data})


@router.get("/{name:path}")
async def get(name: str, request: Request) -> Response:
    """The entry of a document."""
    state = state_of(request)
    job = state.encoding.get(name)
    try:
        info = await asyncio.to_thread(state.documents.get, name)
    except UnknownNameError as error:
        if job is None:
            raise _unknown(error) from error
        info = None
    return JSONResponse(_shown(name, info, job))


@router.delete("/{name:path}")
async def remove(name: str, request: Request) -> Response:
    """Removes a document; one that is being encoded is not stored."""
    state = state_of(request)
    was_queued = await asyncio.to_thread(state.encoding.cancel, name)
    try:
        await asyncio.to_thread(state.documents.remove, name)
    except UnknownNameError as error:
        if not was_queued:
            raise _unknown(error) from error
    try:
        await asyncio.to_thread(state.update_search)
    except Exception:  # it is removed nevertheless, and the next search updates the table
        logger.exception("a removed document is still in the search table")
    return JSONResponse({"id": name, "object": "document", "deleted": True})


async def search(state: State, query: str, top_k: int) -> list[Found]:
    """The documents that match a query."""

    def found() -> list[Found]:
        state.update_search()
        return state.retriever.search(query, top_k)

    return await asyncio.to_thread(found)


async def _store(request: Request, name: str, body: DocumentBody, *, wait: bool) -> Response:
    """201 once it is stored, or 202 at once."""
    state = state_of(request)
    check_name(name)
    job = Job(name=name, text=body.text, overwrite=body.overwrite, pinned=body.pinned)
    state.admission.require_open()
    await _enqueue(state, job, body.metadata, _caller(request, state))
    if not wait:
        return JSONResponse(_shown(name, None, job), 202)
    # Shielded: a client that disconnects does not cancel the storing.
    try:
        info = await asyncio.shield(asyncio.wrap_future(job.result))
    except ApiError:
        if not await request.is_disconnected():  # the client is told, and nothing was stored
            state.encoding.forget(job)
        raise
    return JSONResponse(_shown(name, info, None), 201)


def _unknown(error: UnknownNameError) -> ApiError:
    return ApiError(404, str(error), kind="not_found_error", param="name")


def _shown(name: str, info: DocumentInfo | None, job: Job | None) -> dict[str, Any]:
    """The stored document of a name, its job, or both; at least one exists."""
    fields = {} if info is None else {**vars(info)}
    fields.pop("name", None)
    if "metadata" in fields:
        fields["metadata"] = _unmarked(fields["metadata"])
    status, progress, error = "ready", 1.0, None
    if job is not None:
        status, progress = job.status, job.progress
        fields.setdefault("tokens", job.tokens)
        failed = job.result.exception() if status == "failed" and job.result.done() else None
        error = None if failed is None else str(failed)
    elif info is not None and not info.encoded:
        error = _NOT_ENCODED if info.records else _EVICTED
        status, progress = "failed", 0.0
    if status == "failed" and info is not None and info.encoded:
        status, progress = "ready", 1.0  # the document stored before; `error` tells of the new text
    state = {"status": status, "progress": progress, "error": error}
    return {"id": name, "object": "document", **state, **fields}


#: Field of metadata with the digest of the API key that stored a document, hidden from clients.
#: The number of documents of each caller is limited; without keys all callers are one.
_MARK = "keyhole_caller"
_DIGITS = 16


def _caller(request: Request, state: State) -> str:
    """The digest of the caller's key; "" without keys."""
    if not state.config.api_key:
        return ""
    return hashlib.sha256(bearer(request.headers)).hexdigest()[:_DIGITS]


def _marked(metadata: Mapping[str, Any] | None, caller: str) -> dict[str, Any] | None:
    """Metadata with the caller; ApiError if the client sends this field itself."""
    if metadata is not None and _MARK in metadata:
        raise ApiError(400, f"the key {_MARK!r} is reserved in metadata", param="metadata")
    if not caller:
        return None if metadata is None else dict(metadata)
    return {**(metadata or {}), _MARK: caller}


def _unmarked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as the client gave it."""
    return {name: value for name, value in metadata.items() if name != _MARK}


async def _enqueue(state: State, job: Job, metadata: Mapping[str, Any] | None, caller: str) -> None:
    """Adds a job with the client's metadata; ApiError 403 if the caller has too many documents."""
    job.metadata = _marked(metadata, caller)
    if job.metadata is not None:
        with concerning("metadata"):
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
                f"{len(owned)} documents are stored with this API key, and at most {most} may be; "
                "remove some",
                kind="permission_error",
                code="too_many_documents",
            )
        known = stored.get(job.name) if caller and metadata is None else None
        if known is not None and await asyncio.to_thread(_has_text, state, job):
            job.metadata = _marked(_unmarked(known.metadata), caller)  # keeps its metadata
        state.encoding.add(job)


def _owner(metadata: Mapping[str, Any] | None) -> str:
    return str((metadata or {}).get(_MARK, ""))


def _has_text(state: State, job: Job) -> bool:
    try:
        return state.documents.store.source(job.name) == job.text
    except KeyholeError:  # removed meanwhile, or damaged
        return False

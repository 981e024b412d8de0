"""/v1/documents: store, list, look up and remove documents."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from keyhole.errors import UnknownNameError
from keyhole.server.bodies import DocumentBody
from keyhole.server.errors import ApiError
from keyhole.server.state import state_of

router = APIRouter(prefix="/v1/documents")


@router.put("/{name:path}")
async def put(name: str, request: Request) -> Response:
    """Stores a text: the body itself, or JSON with "text"."""
    raw = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    try:
        if kind == "application/json":
            body = DocumentBody.model_validate_json(raw)
        else:
            body = DocumentBody(text=raw.decode())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{place}: {first['msg']}", param=place or None) from error
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the document is not text in UTF-8: {error}") from error
    documents = state_of(request).llm.llm.documents
    info = await _run(
        functools.partial(
            documents.add, name, body.text, overwrite=body.overwrite, pinned=body.pinned
        )
    )
    return JSONResponse(_shown(info), 201)


@router.get("")
async def listed(request: Request) -> Response:
    """All of them, by name."""
    found = await _run(state_of(request).llm.llm.documents.list)
    return JSONResponse({"object": "list", "data": [_shown(info) for info in found]})


@router.get("/{name:path}")
async def get(name: str, request: Request) -> Response:
    """What is known of one."""
    return JSONResponse(_shown(await _known(request, name, "get")))


@router.delete("/{name:path}")
async def remove(name: str, request: Request) -> Response:
    """Forgets one."""
    await _known(request, name, "remove")
    return JSONResponse({"id": name, "object": "document", "deleted": True})


async def _known(request: Request, name: str, what: str) -> Any:
    documents = state_of(request).llm.llm.documents
    try:
        return await _run(functools.partial(getattr(documents, what), name))
    except UnknownNameError as error:
        raise ApiError(404, str(error), kind="not_found_error", param="name") from error


async def _run(work: Callable[[], Any]) -> Any:
    """In a thread: the store reads and writes files, and encoding waits for the engine."""
    return await asyncio.to_thread(work)


def _shown(info: Any) -> dict[str, Any]:
    fields = dataclasses.asdict(info)
    return {"id": fields.pop("name"), "object": "document", **fields}

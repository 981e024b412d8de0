"""The page's files with their headers, and `/v1/keyhole`: what this server runs."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from functools import cache
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

import keyhole
from keyhole.errors import KeyholeError
from keyhole.policies import available_policies, make_policy
from keyhole.reuse import available_reuse_methods
from keyhole.server.errors import ApiError
from keyhole.server.state import State, state_of

router = APIRouter()
about_router = APIRouter()

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
#: Scripts and styles are files of this server, and text becomes markup only through DOMPurify.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """Content, type and ETag of each file, by its path."""
    found = {}
    folder = resources.files("keyhole.server.page")
    for start, place in (("", folder), ("vendor/", folder / "vendor")):
        for file in place.iterdir():
            kind = _KINDS.get(file.name.rpartition(".")[2])
            if kind is not None:
                data = file.read_bytes()
                tag = hashlib.sha256(data).hexdigest()[:32]
                found[start + file.name] = data, kind, f'"{tag}"'
    return found


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """The page itself."""
    return _file(request, "index.html")


@router.get("/page/{path:path}", include_in_schema=False)
async def file(path: str, request: Request) -> Response:
    """A script, a style sheet or a picture of the page."""
    return _file(request, path)


def _file(request: Request, path: str) -> Response:
    if path not in _files():
        raise ApiError(404, f"the page has no file {path!r}", kind="not_found_error")
    data, kind, tag = _files()[path]
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)


@about_router.get("/v1/keyhole")
async def about(request: Request) -> Response:
    """The server's model, policy, layers, and the policies that a request may name."""
    return JSONResponse(await asyncio.to_thread(_about, state_of(request)))


def _about(state: State) -> dict[str, Any]:
    engine, tokenizer = state.llm.llm.engine, state.tokenizer
    with engine.lock:
        policies = {name: _why_not(state, name) for name in sorted(available_policies())}
    own = engine.policy
    return {
        "object": "keyhole",
        "version": keyhole.__version__,
        "model": state.name,
        "chat": tokenizer is not None and bool(tokenizer.chat_template),
        "policy": {"name": own.name, **dataclasses.asdict(own)},
        "policies": [
            {"name": name, "has_budget": _has_budget(name), "unavailable": why}
            for name, why in policies.items()
        ],
        "reuses": sorted(available_reuse_methods()),
        "layers": engine.geometry.num_layers,
        "kv_heads": max(layer.num_kv_heads for layer in engine.geometry.layers),
        "max_tokens": state.most_tokens,
    }


def _has_budget(name: str) -> bool:
    return "token_budget" in available_policies()[name].__dataclass_fields__


def _why_not(state: State, name: str) -> str | None:
    """Why a request cannot name this policy next to the server's; None if it can."""
    try:
        state.llm.llm.engine.under(make_policy(name))
    except KeyholeError as error:
        return str(error)
    return None

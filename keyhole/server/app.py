"""The application: routes, and every error as an object that clients read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

import keyhole
from keyhole.async_llm import AsyncLLM
from keyhole.server import completions, errors, responses
from keyhole.server.answers import Answer
from keyhole.server.bodies import DetokenizeBody, TokenizeBody
from keyhole.server.documents import routes as documents
from keyhole.server.errors import ApiError, concerning
from keyhole.server.gate import Gate
from keyhole.server.page import routes as page
from keyhole.server.settings import ServerConfig
from keyhole.server.state import State, state_of
from keyhole.tokenization import chat_text, encode_text

logger = logging.getLogger("keyhole.server")


def create_app(llm: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application over an engine, for uvicorn or any other server.

    ConfigError for an invalid config.
    """
    config = config or ServerConfig()
    # With "default", FastAPI omits its own 422, which this server never sends.
    failed: dict[int | str, dict[str, Any]] = {
        "default": {"model": errors.ErrorBody, "description": "what is wrong"}
    }
    # Lets a browser send a key, which the gate checks.
    keys = [Depends(HTTPBearer(auto_error=False))] if config.api_key else []
    app = FastAPIOffline(
        redoc_url=None,
        title="Keyhole",
        version=keyhole.__version__,
        responses=failed,
        dependencies=keys,
    )
    state = app.state.keyhole = State(llm, config)
    app.include_router(completions.router)
    app.include_router(responses.router)
    app.include_router(documents.router)
    app.include_router(page.about_router)
    if config.page:
        app.include_router(page.router)
    for path, handler in _PLAIN.items():
        app.add_api_route(path, handler, methods=["GET"])
    for path in ("/health", "/ready"):  # some load balancers ask for no body
        app.add_api_route(path, _PLAIN[path], methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])
    app.add_exception_handler(RequestValidationError, _handler(errors.invalid))
    app.add_exception_handler(HTTPException, _handler(errors.plain))
    for cls in (ApiError, keyhole.KeyholeError, RecursionError, TimeoutError):
        app.add_exception_handler(cls, _handler(errors.api_error))
    app.add_middleware(Gate, state=state)
    return app


def whole_body(body: bytes) -> Receive:
    """What an application receives of a request that is here whole and does not disconnect."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()
        raise AssertionError("the event is never set")

    return receive


def _handler(convert: Any) -> Any:
    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error.__cause__, ClientDisconnect):  # FastAPI takes it for a wrong body
            return Response(status_code=errors.GONE)
        answer: ApiError = convert(error)
        if answer.status == 404 and isinstance(error, HTTPException):
            answer = errors.no_such_path(request.method, request.url.path)
        state_of(request).metrics.failed(answer.kind)
        if errors.is_failure(error, answer):
            logger.error("a request failed", exc_info=error)
        return answer.response()

    return handle


async def models(request: Request) -> Response:
    """The model that is served, and its LoRA adapters."""
    state = state_of(request)
    data = [_model(state, name) for name in state.names]
    return JSONResponse({"object": "list", "data": data})


async def model(name: str, request: Request) -> Response:
    """The model that is served, or one of its LoRA adapters, by name."""
    state = state_of(request)
    state.adapter(name)
    return JSONResponse(_model(state, name))


def _model(state: State, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": Answer("model", name).created,
        "owned_by": "keyhole",
        "parent": None if name == state.name else state.name,
        "max_model_len": state.most_tokens,
    }


async def health(request: Request) -> Response:
    """200 while the process answers."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 while requests are accepted, 503 once the server is stopping."""
    stopping = state_of(request).admission.is_draining
    return JSONResponse({"status": "draining" if stopping else "ready"}, 503 if stopping else 200)


async def version(request: Request) -> Response:
    """Keyhole's version."""
    return JSONResponse({"version": keyhole.__version__})


async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    body = await asyncio.to_thread(generate_latest, state_of(request).metrics.registry)
    return Response(body, media_type=CONTENT_TYPE_LATEST)


async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a text, or of a chat."""
    state = state_of(request)
    body.check_others()
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")

    def encode() -> list[int]:
        if body.prompt is not None:
            return encode_text(state.tokenizer, body.prompt, special=body.add_special_tokens)
        text = chat_text(state.tokenizer, body.messages or [])
        return encode_text(state.tokenizer, text, special=False)

    with concerning("messages" if body.prompt is None else "prompt"):
        ids = await asyncio.to_thread(encode)
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": state.most_tokens})


async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids."""
    state = state_of(request)
    body.check_others()
    size = state.llm.llm.engine.model.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise ApiError(400, f"token id {token} must be from 0 to {size - 1}", param="tokens")
    if state.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    text = await asyncio.to_thread(state.tokenizer.decode, body.tokens)
    return JSONResponse({"prompt": text})


_PLAIN: dict[str, Callable[..., Any]] = {
    "/v1/models": models,
    "/v1/models/{name:path}": model,
    "/health": health,
    "/ready": ready,
    "/version": version,
    "/metrics": metrics,
}

"""Every error as the object that OpenAI's clients read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from keyhole.documents.integrity import RecordError
from keyhole.errors import (
    CapacityError,
    ConfigError,
    KeyholeError,
    NumericalError,
    PromptTooLongError,
    RequestError,
    StorageFullError,
)

#: The status of a request whose client has disconnected, who does not read it.
GONE = 499
#: Class of an error -> status, type, code; the first match counts.
_KINDS: tuple[tuple[type[KeyholeError], int, str, str | None], ...] = (
    (PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (RequestError, 400, "invalid_request_error", None),
    (ConfigError, 400, "invalid_request_error", None),
    (StorageFullError, 507, "server_error", "insufficient_storage"),
    (CapacityError, 400, "invalid_request_error", "context_length_exceeded"),
    (NumericalError, 500, "server_error", "numerical_error"),
    (KeyholeError, 500, "server_error", None),
)


class ErrorObject(BaseModel):
    """The error object: type is the kind of error, param the field concerned."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error answer."""

    error: ErrorObject


class ApiError(Exception):
    """An error that is sent as an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.kind = kind
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code},
        }

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status, self.headers)


def api_error(error: Exception) -> ApiError:
    """The ApiError of any exception; messages of internal errors are only logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):
        return ApiError(400, "a value in the body is nested too deeply; use fewer levels")
    if isinstance(error, TimeoutError):
        message = "the request took longer than its own timeout or the server's"
        return ApiError(504, message, kind="timeout")
    if isinstance(error, RecordError) and error.kind != "missing":  # a client cannot change it
        return ApiError(500, str(error), kind="server_error", code="unreadable_document")
    for cls, status, kind, code in _KINDS:
        if isinstance(error, cls):
            return ApiError(status, str(error), kind=kind, param=error.field, code=code)
    return ApiError(500, "internal error; the server's log has details", kind="server_error")


def is_failure(error: Exception, answer: ApiError) -> bool:
    """Whether the log has to explain the error of an answer."""
    return answer.status >= 500 and not isinstance(error, ApiError | TimeoutError)


@contextmanager
def concerning(field: str | Callable[[KeyholeError], str | None]) -> Iterator[None]:
    """Adds the field concerned to the errors of the block, or what a function finds for each."""
    try:
        yield
    except KeyholeError as error:
        found = api_error(error)
        if found.status >= 500:  # not the request's fault
            raise
        found.body["error"]["param"] = field if isinstance(field, str) else field(error)
        raise found from error


def draining() -> ApiError:
    """The error for new work while the server stops."""
    return ApiError(503, "the server is stopping", kind="server_error", code="draining")


def queue_full(message: str) -> ApiError:
    """The error for new work where no more may wait."""
    return ApiError(
        429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": "1"}
    )


def cut_off() -> ApiError:
    """The error for an answer that is not complete after the drain timeout."""
    message = "the server shut down before this answer was complete; try again"
    return ApiError(503, message, kind="server_error", code="draining")


#: What pydantic adds to the path of a field that may have several types, or whose key is wrong;
#: `names` and `searched` are the forms of `documents`.
_NOT_A_FIELD = re.compile(r"body|str|list\[.*|\[key\]|names|searched")


def invalid(error: RequestValidationError | ValidationError) -> ApiError:
    """The first error in a body, with the path of its field."""
    first: Mapping[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is not JSON: {reason}")
    parts, given = [str(part) for part in first["loc"]], first.get("input")
    named = parts[1:] if parts[:1] == ["query"] else parts  # of the address
    place = ".".join(part for part in named if not _NOT_A_FIELD.fullmatch(part))
    if not place:
        if isinstance(given, bytes):  # FastAPI has not parsed it
            return ApiError(400, "the body must be JSON, with Content-Type: application/json")
        return ApiError(400, "the body must be a JSON object")
    if first["type"] == "value_error":  # FastAPI's of an upload: a part without a name is a text
        right = "must be a file with a filename, such as notes.txt, which tells its format"
        return ApiError(400, f"{place} {right}", param=place)
    shown = f", not {given!r:.80}" if isinstance(given, str | int | float) else ""
    return ApiError(400, f"{place}: {first['msg']}{shown}", param=place)


def plain(error: HTTPException) -> ApiError:
    """An error of the framework, such as a method that a path does not have."""
    if error.status_code == 400 and isinstance(error.__cause__, ValueError):  # of a body
        reason = str(error.__cause__).partition(";")[0]  # Python's advice is for programs
        return ApiError(400, f"the body is not JSON: {reason}")
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def no_such_path(method: str, path: str) -> ApiError:
    """The error for a path that is not served, such as embeddings."""
    message = f"unknown path '{method} {path}'; /docs lists all paths"
    return ApiError(404, message, kind="not_found_error")

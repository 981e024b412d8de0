"""The response: whole, or as typed events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from keyhole.engine.sequence import Piece, Result
from keyhole.server.answers import usage
from keyhole.server.chat.reply import Reply
from keyhole.server.errors import ApiError
from keyhole.server.responses.bodies import ResponsesBody
from keyhole.server.responses.items import ItemWriter

_Documents = list[dict[str, Any]]


@dataclass
class ResponseAnswer:
    """One response. done: called with its id and the reply when it is complete."""

    model: str
    body: ResponsesBody
    reply: Reply
    done: Callable[[str, Reply], None]
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._writer = ItemWriter(self.reply)
        self._count = 0

    def take(self, index: int, piece: Piece) -> None:
        """Keeps a piece for `whole`."""
        self._writer.take(self.reply.add(piece))

    def whole(
        self, results: Sequence[Result], documents: _Documents | None = None
    ) -> dict[str, Any]:
        """The whole response."""
        status = _status(results[0])
        self._writer.close(status)
        self.done(self.id, self.reply)
        return self._shown(status, results)

    def begin(self) -> list[dict[str, Any]]:
        """The events before the first piece of a stream."""
        shown = self._shown("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [{"type": kind, "response": shown} for kind in kinds]

    def piece(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        """The events of a piece."""
        return self._writer.take(self.reply.add(piece))

    def closing(
        self,
        results: Sequence[Result],
        documents: list[dict[str, Any]] | None,
        *,
        wants_usage: bool,
    ) -> list[dict[str, Any]]:
        """The events after the last piece, always with the usage."""
        status = _status(results[0])
        said = self._writer.close(status)
        self.done(self.id, self.reply)
        return [*said, {"type": f"response.{status}", "response": self._shown(status, results)}]

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event that ends a stream with an error."""
        self._writer.close("incomplete")
        found = error.body["error"]
        shown = self._shown("failed")
        shown["error"] = {"code": found["code"] or found["type"], "message": found["message"]}
        return {"type": "response.failed", "response": shown}

    def frame(self, said: dict[str, Any]) -> bytes:
        """An event, with its number."""
        numbered = {**said, "sequence_number": self._count}
        self._count += 1
        return b"event: %b\ndata: %b\n\n" % (said["type"].encode(), to_json(numbered))

    @property
    def end(self) -> bytes:
        """Nothing: the type of the last event marks the end."""
        return b""

    def _shown(self, status: str, results: Sequence[Result] = ()) -> dict[str, Any]:
        body = self.body
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": [item.shown() for item in self._writer.items],
            "usage": self._usage(results) if results else None,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def _usage(self, results: Sequence[Result]) -> dict[str, Any]:
        found = usage(results)
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": found["prompt_tokens_details"],
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reply.reasoning_tokens},
            "total_tokens": found["total_tokens"],
            "keyhole": found["keyhole"],
        }


def _status(result: Result) -> str:
    return "incomplete" if result.finish_reason == "length" else "completed"

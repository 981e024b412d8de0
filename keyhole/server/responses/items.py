"""The items of a response, and the events that stream them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from keyhole.server.chat.reply import Event, Reasoning, Reply
from keyhole.server.chat.tool_parser import CallArguments, CallBegin

_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
#: Kind of an item -> the name of its text events.
_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


@dataclass
class OutputItem:
    """Reasoning, a message or a call. text: for a call, its arguments."""

    kind: str
    call_id: str = ""
    name: str = ""
    text: str = ""
    status: str = "in_progress"
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def shown(self) -> dict[str, Any]:
        """The item as clients receive it."""
        found: dict[str, Any] = {
            "id": f"{_IDS[self.kind]}_{self.id}",
            "type": self.kind,
            "status": self.status,
        }
        if self.kind == "function_call":
            return found | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        parts = [self.part()] if self.text or self.status != "in_progress" else []
        if self.kind == "reasoning":
            return found | {"summary": [], "content": parts}
        return found | {"role": "assistant", "content": parts}

    def part(self, text: str | None = None) -> dict[str, Any]:
        """Its only part; text: replaces its own."""
        said = self.text if text is None else text
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": said}
        return {"type": "output_text", "text": said, "annotations": [], "logprobs": []}


class ItemWriter:
    """Creates items and events from the parts of a reply."""

    def __init__(self, reply: Reply) -> None:
        self.items: list[OutputItem] = []
        self._reply = reply

    def take(self, events: list[Event]) -> list[dict[str, Any]]:
        """The stream events of these parts."""
        said: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, CallBegin):
                call_id = self._reply.calls[event.index].id
                said += self._open(OutputItem("function_call", call_id, event.name))
            elif isinstance(event, CallArguments):
                said += self._write(event.text)
            else:
                is_reasoning = isinstance(event, Reasoning)
                kind = "reasoning" if is_reasoning else "message"
                if not self.items or self.items[-1].kind != kind:
                    said += self._open(OutputItem(kind))
                said += self._write(event.text if isinstance(event, Reasoning) else event)
        return said

    def close(self, status: str) -> list[dict[str, Any]]:
        """The end of the last item; status: "completed" or "incomplete"."""
        if not self.items or self.items[-1].status != "in_progress":
            return []
        item = self.items[-1]
        item.status = status
        said: list[dict[str, Any]] = []
        if item.kind == "function_call":
            done: dict[str, Any] = {"arguments": item.text, "name": item.name}
        else:
            done = {"text": item.text, "content_index": 0}
        if item.kind == "message":
            done["logprobs"] = []
        said.append(self._event(f"{_EVENTS[item.kind]}.done", **done))
        if item.kind != "function_call":
            said.append(
                self._event("response.content_part.done", content_index=0, part=item.part())
            )
        return [*said, self._of_item("response.output_item.done", item)]

    def _open(self, item: OutputItem) -> list[dict[str, Any]]:
        said = self.close("completed")
        self.items.append(item)
        said.append(self._of_item("response.output_item.added", item))
        if item.kind != "function_call":
            part = item.part("")
            said.append(self._event("response.content_part.added", content_index=0, part=part))
        return said

    def _write(self, text: str) -> list[dict[str, Any]]:
        item = self.items[-1]
        item.text += text
        more: dict[str, Any] = {} if item.kind == "function_call" else {"content_index": 0}
        if item.kind == "message":
            more["logprobs"] = []
        return [self._event(f"{_EVENTS[item.kind]}.delta", delta=text, **more)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = len(self.items) - 1
        named = {"item_id": self.items[place].shown()["id"], "output_index": place}
        return {"type": kind, **named, **fields}

    def _of_item(self, kind: str, item: OutputItem) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.items) - 1, "item": item.shown()}

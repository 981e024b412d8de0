"""Splits a streamed reply into reasoning, answer and tool calls."""

from __future__ import annotations

import secrets
import string
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from keyhole.engine.sequence import Piece
from keyhole.server.chat.tool_parser import CallArguments, CallBegin, CallParser, held_back

_LETTERS = string.ascii_letters + string.digits
#: Mistral's templates require nine letters or digits; others take any text.
_ID_LENGTH = 9


@dataclass(frozen=True)
class Markers:
    """The markers before and after the reasoning."""

    begin: str
    end: str


_KNOWN = (Markers("<think>", "</think>"), Markers("[THINK]", "[/THINK]"))


def markers_of(template: str) -> Markers | None:
    """The markers of a chat template; None: it marks no reasoning."""
    return next((markers for markers in _KNOWN if markers.end in template), None)


class ReasoningSplitter:
    """Splits streamed text into reasoning and answer.

    is_inside: whether the text begins inside the reasoning, as the prompt ends with its marker.
    has_ended: whether the marker after the reasoning has come.
    """

    def __init__(self, markers: Markers, *, is_inside: bool) -> None:
        self.markers = markers
        self._left = ""  # not given out yet
        self._is_begun = is_inside
        self.is_inside = is_inside
        self.has_ended = False
        self._is_done = False

    def feed(self, text: str, *, final: bool = False) -> list[tuple[bool, str]]:
        """The new parts as (is reasoning, text); final: no more text follows."""
        self._left += text
        found: list[tuple[bool, str]] = []
        if not self._is_begun:
            self._begin(final=final)
        if self._is_begun and self.is_inside:
            found += self._inside(final=final)
        if self._is_done or (self._is_begun and not self.is_inside):
            found += self._after()
        return found

    def _begin(self, *, final: bool) -> None:
        start, begin = self._left.lstrip(), self.markers.begin
        if start.startswith(begin):
            self._left, self.is_inside, self._is_begun = start[len(begin) :], True, True
        elif final or not begin.startswith(start):
            self._is_begun = True

    def _inside(self, *, final: bool) -> list[tuple[bool, str]]:
        text, ended, rest = self._left.partition(self.markers.end)
        if ended:
            self.is_inside, self._is_done, self._left = False, True, rest
            self.has_ended = True
        else:
            size = 0 if final else held_back(text, [self.markers.end])
            text, self._left = text[: len(text) - size], text[len(text) - size :]
        return [(True, text)] if text else []

    def _after(self) -> list[tuple[bool, str]]:
        if self._is_done:  # drop the empty lines between reasoning and answer
            self._left = self._left.lstrip("\n")
            self._is_done = not self._left
        text, self._left = self._left, ""
        return [(False, text)] if text else []


@dataclass(frozen=True)
class Reasoning:
    """A part of the reasoning."""

    text: str


#: Text of the answer, or one of the other parts.
Event = str | Reasoning | CallBegin | CallArguments


@dataclass
class Call:
    """A tool call. arguments: JSON."""

    name: str
    arguments: str = ""
    id: str = field(
        default_factory=lambda: "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))
    )


@dataclass
class Reply:
    """A reply so far, and the parsers of the rest.

    splitter, parser: None without reasoning markers, or without tools. tokenizer: finds where the
    reasoning ends in a piece of several tokens; None: after the piece. reasoning_tokens: how many
    tokens the reasoning took, its markers included.
    """

    splitter: ReasoningSplitter | None = None
    parser: CallParser | None = None
    tokenizer: Any = None
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    reasoning_tokens: int = 0
    _tokens: list[int] = field(default_factory=list)  # until the reasoning ends

    def add(self, piece: Piece) -> list[Event]:
        """Takes a piece; returns its parts."""
        final = piece.result is not None
        parts = [(False, piece.text)]
        if self.splitter is not None:
            was_over = self.splitter.has_ended
            parts = self.splitter.feed(piece.text, final=final)
            if not was_over:
                self._count(self.splitter, piece.token_ids)
        events: list[Event] = [Reasoning(text) for is_reasoning, text in parts if is_reasoning]
        answer = "".join(text for is_reasoning, text in parts if not is_reasoning)
        events += [answer] if self.parser is None else self.parser.feed(answer, final=final)
        found = [event for event in events if event != ""]
        for event in found:
            self._take(event)
        return found

    def _count(self, splitter: ReasoningSplitter, tokens: list[int]) -> None:
        """Counts the reasoning's tokens, given those that came with the newest text."""
        self._tokens += tokens
        if splitter.has_ended:
            self.reasoning_tokens = self._end_of_reasoning(splitter.markers.end, len(tokens))
        elif splitter.is_inside:
            self.reasoning_tokens = len(self._tokens)

    def _end_of_reasoning(self, marker: str, newest: int) -> int:
        """How many tokens there are up to the marker, most likely among the newest."""
        known, tokenizer = self._tokens, self.tokenizer
        if tokenizer is None:
            return len(known)

        def has_marker(count: int) -> bool:
            return marker in str(tokenizer.decode(known[:count], skip_special_tokens=False))

        start = len(known) - newest
        while start > 0 and has_marker(start):  # a text that may become a stop text comes late
            start = max(0, start - max(newest, 1))
        return bisect_left(range(len(known)), True, lo=start, key=has_marker)

    def _take(self, event: Event) -> None:
        if isinstance(event, str):
            self.text += event
        elif isinstance(event, Reasoning):
            self.reasoning += event.text
        elif isinstance(event, CallBegin):
            self.calls.append(Call(event.name))
        else:
            self.calls[event.index].arguments += event.text

    def finish_reason(self, reason: str) -> str:
        """The finish reason in OpenAI's terms."""
        return "tool_calls" if self.calls and reason == "stop" else reason

    def message(self) -> dict[str, Any]:
        """The whole reply, as a chat message."""
        calls = [
            {"id": call.id, "type": "function"}
            | {"function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        content = self.text if self.text or not calls else None
        return (
            {"role": "assistant", "content": content}
            | ({"reasoning_content": self.reasoning} if self.reasoning else {})
            | ({"tool_calls": calls} if calls else {})
        )

    def delta(self, events: list[Event]) -> dict[str, Any]:
        """The delta of a stream event for these parts."""
        found: dict[str, Any] = {}
        for event in events:
            if isinstance(event, str):
                found["content"] = found.get("content", "") + event
            elif isinstance(event, Reasoning):
                found["reasoning_content"] = found.get("reasoning_content", "") + event.text
            else:
                found.setdefault("tool_calls", []).append(self._call_delta(event))
        return found

    def _call_delta(self, event: CallBegin | CallArguments) -> dict[str, Any]:
        if isinstance(event, CallArguments):
            return {"index": event.index, "function": {"arguments": event.text}}
        named = {"name": event.name, "arguments": ""}
        call = self.calls[event.index]
        return {"index": event.index, "id": call.id, "type": "function", "function": named}

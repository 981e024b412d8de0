"""Finds the tool calls of Qwen3-Coder in streamed text.

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from keyhole.server.chat.reasoning import held_back
from keyhole.server.chat.tool_parser import CallArguments, CallBegin, ToolEvent

_MARKERS = ("<tool_call>", "<function=")  # the model sometimes omits the first one
_MARKS = (*_MARKERS, "</tool_call>")
_START = re.compile("|".join(_MARKERS))
_BETWEEN = re.compile(r"\s*(?:</?tool_call>\s*)*")
_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_END = "</function>"


class XmlToolCallParser:
    """As `ToolCallParser`, for XML elements.

    functions: name -> schema of the parameters, which says which values are strings.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        self._functions = functions
        self._left = ""  # not returned yet
        self._state: Callable[[bool], list[ToolEvent]] = self._in_text
        self._types: Mapping[str, Any] = {}  # of the parameters of the current call
        self._count = self._given = 0

    def feed(self, text: str, *, final: bool = False) -> list[ToolEvent]:
        """The new parts; final: no more text follows."""
        self._left += text
        found: list[ToolEvent] = []
        while True:
            state, size = self._state, len(self._left)
            found += state(final)
            if (self._state, len(self._left)) == (state, size):
                return [event for event in found if event != ""]

    def _in_text(self, final: bool) -> list[ToolEvent]:
        begun = _START.search(self._left)
        if begun is not None:
            text, self._left = self._left[: begun.start()], self._left[begun.start() :]
            self._state = self._between
            return [text.rstrip("\n")]
        size = 0 if final else held_back(self._left, _MARKERS)
        text = self._left[: len(self._left) - size]
        # Empty lines between text and a call belong to neither.
        text = text if final else text.rstrip("\n")
        self._left = self._left[len(text) :]
        return [text] if text.strip() or not self._count else []

    def _between(self, final: bool) -> list[ToolEvent]:
        """Before a call, between two, or after the last one."""
        between = _BETWEEN.match(self._left)
        rest = self._left[between.end() :] if between else self._left
        found = _FUNCTION.match(rest)
        if found is not None and found[1] in self._functions:
            self._left, self._state, self._given = rest[found.end() :], self._in_call, 0
            self._types = self._functions[found[1]].get("properties") or {}
            self._count += 1
            return [CallBegin(self._count - 1, found[1])]
        is_name = rest.startswith("<function=") and not {">", "\n"} & set(rest)
        if not rest or (not final and (is_name or any(m.startswith(rest) for m in _MARKS))):
            return []
        self._left, self._state = "", self._in_text
        return [rest]

    def _in_call(self, _: bool) -> list[ToolEvent]:
        start = self._left.lstrip()
        found = _PARAMETER.match(start) if "</parameter>" in start else None
        if found is not None:
            self._left, self._given = start[found.end() :], self._given + 1
            value = json.dumps(_typed(found[2], self._types.get(found[1])), ensure_ascii=False)
            said = f"{', ' if self._given > 1 else '{'}{json.dumps(found[1])}: {value}"
            return [CallArguments(self._count - 1, said)]
        if start.startswith(_END):
            self._left, self._state = start[len(_END) :], self._between
            return [CallArguments(self._count - 1, "}" if self._given else "{}")]
        return []


def _typed(text: str, schema: Any) -> Any:
    """A value in the type of its schema; a string if the schema says so, or says nothing."""
    kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    if "string" in kind:
        return text
    try:  # templates show booleans as Python does
        return json.loads(text.lower() if kind == "boolean" else text)
    except ValueError:
        return text

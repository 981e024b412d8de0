"""Tool calls in streamed text: the formats of the common chat templates, and their parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from keyhole.errors import UnknownNameError
from keyhole.server.chat.parameters import is_text, members


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A format of tool calls.

    begin, end: around each call, or around all of them. arguments: the key next to "name".
    is_list: the calls of a reply are one JSON list. is_named: a call is its name, "[ARGS]" and its
    arguments. is_bare: a call may also come without its marker, as the whole reply. is_xml: a call
    is an XML element for the function, with one for each parameter.
    """

    name: str
    begin: str
    end: str = ""
    arguments: str = "arguments"
    is_list: bool = False
    is_named: bool = False
    is_bare: bool = False
    is_xml: bool = False


HERMES = ToolFormat(name="hermes", begin="<tool_call>", end="</tool_call>")
LLAMA3 = ToolFormat(name="llama3", begin="<|python_tag|>", arguments="parameters", is_bare=True)
MISTRAL = ToolFormat(name="mistral", begin="[TOOL_CALLS]", is_list=True)
MISTRAL_NAMED = ToolFormat(name="mistral_named", begin="[TOOL_CALLS]", is_named=True)
QWEN3_CODER = ToolFormat(name="qwen3_coder", begin="<tool_call>", end="</tool_call>", is_xml=True)

FORMATS = {one.name: one for one in (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, QWEN3_CODER)}


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template writes; None if it is not a known one."""
    if "<function=" in template and "<parameter=" in template:
        return QWEN3_CODER
    if HERMES.begin in template:
        return HERMES
    if MISTRAL.begin in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    return LLAMA3 if '"parameters"' in template else None


def named_format(name: str, template: str) -> ToolFormat | None:
    """The format of this name; "auto": the template's. UnknownNameError for an unknown name."""
    if name == "auto":
        return format_of(template)
    if name not in FORMATS:
        raise UnknownNameError("tool_parser", name, ["auto", *FORMATS])
    return FORMATS[name]


@dataclass(frozen=True)
class CallBegin:
    """The beginning of a tool call; index: its number in the reply."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A part of a call's arguments; all parts together are JSON."""

    index: int
    text: str


#: Text outside calls, or a call.
ToolEvent = str | CallBegin | CallArguments


def held_back(text: str, markers: Iterable[str]) -> int:
    """Characters at the end of a text that may be the beginning of a marker."""
    sizes = (
        size
        for marker in markers
        for size in range(min(len(marker) - 1, len(text)), 0, -1)
        if text.endswith(marker[:size])
    )
    return max(sizes, default=0)


class CallParser:
    """Parses a reply in which text and calls alternate. _state: reads what comes next."""

    def __init__(self) -> None:
        self._left = ""  # not returned yet
        self._state: Callable[[bool], list[ToolEvent]] = self._in_text
        self._count = 0

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
        raise AssertionError(f"{type(self).__name__} must define _in_text")

    def _without_call(self, final: bool, markers: Iterable[str]) -> list[ToolEvent]:
        """The text, without an end that may be the beginning of a marker."""
        if final:
            text, self._left = self._left, ""
            return [text.rstrip() if self._count else text]
        text = self._left[: len(self._left) - held_back(self._left, markers)]
        shown = self._stripped(text)
        self._left = self._left[len(shown) :]
        return [shown]

    def _as_text(self, text: str) -> list[ToolEvent]:
        """Returns the first character of what turned out not to be a call, and the rest is read as
        text: calls in it are found, whether or not they have arrived already.
        """
        self._left, self._state = text[1:], self._in_text
        return [text[:1]]

    def _begun(self, name: str) -> CallBegin:
        self._count += 1
        return CallBegin(self._count - 1, name)

    def _stripped(self, text: str) -> str:
        """Text before a call without the empty lines at its end, which belong to neither; after a
        call without any white space there.
        """
        return text.rstrip() if self._count else text.rstrip("\n")


_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
#: Characters between calls, and around a list of them.
_BETWEEN = " \t\n\r,;[]"


class ToolCallParser(CallParser):
    """For the formats with JSON. names: of the tools; a call of any other name is text."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str]) -> None:
        super().__init__()
        self._format, self._names = tool_format, names
        self._scan = _JsonScan()
        self._scanned = 0  # characters of an object that has not ended, so none is read twice
        if tool_format.is_bare:
            self._state = self._at_begin

    def feed(self, text: str, *, final: bool = False) -> list[ToolEvent]:
        """The new parts; final: no more text follows."""
        found = super().feed(text, final=final)
        if final and self._left.strip(_BETWEEN) and self._state == self._at_call:
            found.append(self._left)
        return found

    def _at_begin(self, final: bool) -> list[ToolEvent]:
        """For a format without markers, the first character decides."""
        start = self._left.lstrip()
        if start or final:
            self._state = self._at_call if start.startswith("{") else self._in_text
        return []

    def _in_text(self, final: bool) -> list[ToolEvent]:
        text, begun, rest = self._left.partition(self._format.begin)
        if begun:
            self._state, self._left = self._at_call, rest
            return [self._stripped(text)]
        return self._without_call(final, [self._format.begin])

    def _at_call(self, final: bool) -> list[ToolEvent]:
        """Before a call, between two, or after the last one."""
        plain, begin = self._left.lstrip(), self._format.begin
        if plain.startswith(begin):
            self._left = plain[len(begin) :]
            return []
        if not plain or (begin.startswith(plain) and not final):
            return []
        return self._named(plain, final) if self._format.is_named else self._object(plain, final)

    def _named(self, plain: str, final: bool) -> list[ToolEvent]:
        """NAME[ARGS]{...}."""
        found = _NAMED.match(plain)
        if found is None:
            return self._as_text(plain) if final else []
        return self._begin(found[1], plain[found.end() :], raw=plain)

    def _object(self, plain: str, final: bool) -> list[ToolEvent]:
        """{"name": ..., "arguments": {...}}, alone or in a list."""
        start = plain.lstrip(_BETWEEN)
        if not start.startswith("{"):
            return self._behind(start, final)
        found, scanned = _HEAD.match(start), self._scanned
        if found is not None:
            self._scan, self._scanned = _JsonScan(), 0
            return self._begin(_parsed(found[1]), start[found.end() :], raw=start)
        end = self._scan.end_of(start[scanned:])
        self._scanned = len(start) if end is None else 0
        return [] if end is None else self._whole(start[: scanned + end], start[scanned + end :])

    def _behind(self, start: str, final: bool) -> list[ToolEvent]:
        """After a call: its end marker, or text."""
        end = self._format.end
        if end and start.startswith(end):
            self._left, self._state = start[len(end) :], self._in_text
        elif start and (final or not end.startswith(start)):
            return self._as_text(start)
        return []

    def _begin(self, name: Any, rest: str, *, raw: str) -> list[ToolEvent]:
        if not isinstance(name, str) or name not in self._names:
            return self._as_text(raw)
        self._left, self._state, self._scan = rest, self._in_arguments, _JsonScan()
        return [self._begun(name)]

    def _in_arguments(self, _: bool) -> list[ToolEvent]:
        end = self._scan.end_of(self._left)
        text = self._left if end is None else self._left[:end]
        self._left = self._left[len(text) :]
        if end is not None:
            self._state = self._at_call if self._format.is_named else self._at_close
        return [CallArguments(self._count - 1, text)] if text else []

    def _at_close(self, _: bool) -> list[ToolEvent]:
        """The closing brace of the object with name and arguments."""
        start = self._left.lstrip()
        if start:
            self._left, self._state = start.removeprefix("}"), self._at_call
        return []

    def _whole(self, text: str, rest: str) -> list[ToolEvent]:
        """A call with its keys in another order, or with its arguments as a JSON string."""
        call = _parsed(text)
        name = call.get("name") if isinstance(call, dict) else None
        if call is None or not isinstance(name, str) or name not in self._names:
            return self._as_text(text + rest)
        given = call.get("arguments", call.get("parameters", {}))
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        self._left, self._state = rest, self._at_call
        return [self._begun(name), CallArguments(self._count - 1, arguments)]


def _parsed(text: str) -> Any:
    """The value of a JSON text; None if it is not JSON, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class _JsonScan:
    """Finds the end of a JSON object in streamed text."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def end_of(self, text: str) -> int | None:
        """The index after the object's closing brace in this piece; None: it continues."""
        for place, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


_MARKERS = ("<tool_call>", "<function=")  # the model sometimes omits the first one
_MARKS = (*_MARKERS, "</tool_call>")
_START = re.compile("|".join(_MARKERS))
_BETWEEN_XML = re.compile(r"\s*(?:</?tool_call>\s*)*")
_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
#: A value may have the text of its end, which then is not followed by what follows an element.
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*<(?:parameter=|/function>))", re.DOTALL
)
_END = "</function>"
#: Values that templates show as Python does, as JSON.
_AS_PYTHON = {"true": "true", "false": "false", "none": "null"}


class XmlToolCallParser(CallParser):
    """For the XML elements of Qwen3-Coder.

        <tool_call>
        <function=weather>
        <parameter=city>
        Oslo
        </parameter>
        </function>
        </tool_call>

    functions: name -> schema of the parameters, which says which values are strings.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._functions = functions
        self._schema: Mapping[str, Any] = {}  # of the parameters of the current call
        self._given = 0

    def _in_text(self, final: bool) -> list[ToolEvent]:
        begun = _START.search(self._left)
        if begun is None:
            return self._without_call(final, _MARKERS)
        text, self._left = self._left[: begun.start()], self._left[begun.start() :]
        self._state = self._between
        return [self._stripped(text)]

    def _between(self, final: bool) -> list[ToolEvent]:
        """Before a call, between two, or after the last one."""
        between = _BETWEEN_XML.match(self._left)
        rest = self._left[between.end() :] if between else self._left
        found = _FUNCTION.match(rest)
        if found is not None and found[1] in self._functions:
            self._left, self._state, self._given = rest[found.end() :], self._in_call, 0
            self._schema = self._functions[found[1]]
            return [self._begun(found[1])]
        is_name = rest.startswith("<function=") and not {">", "\n"} & set(rest)
        if not rest or (not final and (is_name or any(m.startswith(rest) for m in _MARKS))):
            return []
        return self._as_text(rest)

    def _in_call(self, _: bool) -> list[ToolEvent]:
        start = self._left.lstrip()
        found = _PARAMETER.match(start) if "</parameter>" in start else None
        if found is not None:
            self._left, self._given = start[found.end() :], self._given + 1
            value = _as_json(found[2], found[1], self._schema)
            part = f"{', ' if self._given > 1 else '{'}{json.dumps(found[1])}: {value}"
            return [CallArguments(self._count - 1, part)]
        if start.startswith(_END):
            self._left, self._state = start[len(_END) :], self._between
            return [CallArguments(self._count - 1, "}" if self._given else "{}")]
        return []


def _as_json(text: str, name: str, parameters: Mapping[str, Any]) -> str:
    """The value of a parameter in the type of its schema, as JSON; a string if it is no such."""
    if not is_text((members(parameters).get("properties") or {}).get(name), parameters):
        with suppress(ValueError, RecursionError):  # not JSON, such as NaN, or nested too deeply
            value = json.loads(_AS_PYTHON.get(text.lower(), text))
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)

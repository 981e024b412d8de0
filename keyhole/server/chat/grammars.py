"""The grammar of a reply, for llguidance: response_format and tool_choice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from keyhole.grammar import JSON_WHITESPACE
from keyhole.server.chat.parameters import choices, is_text, members, texts, with_definitions
from keyhole.server.chat.reply import Markers
from keyhole.server.chat.tool_parser import ToolFormat
from keyhole.server.errors import ApiError

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
#: What each field of structured_outputs must be.
_CONSTRAINTS = {
    "choice": "a list of at least one text, none of them empty",
    "grammar": "a grammar as text",
    "json": "a JSON schema",
    "regex": "a regular expression as text",
}
#: What these mean in a schema's pattern: ASCII, as in JavaScript.
_ASCII = {r"\d": "0-9", r"\w": "0-9A-Za-z_"}
#: The end of an element, which a text ends before: in a rule, and in a regular expression.
_XML_END = json.dumps("\n</parameter>\n")
_XML_LAST = r"\n<\/parameter>\n"


def answer_rule(
    response_format: Mapping[str, Any] | None, name: str = "response_format"
) -> str | None:
    """The rule of a response_format; None: any text. ApiError for an unknown one.

    name: the field as the client knows it.
    """
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return _json(_ANY_OBJECT)
    if kind == "json_schema":
        found = response_format.get("json_schema")
        schema = found.get("schema") if isinstance(found, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ApiError(
                400, "response_format.json_schema needs a 'schema'", param="response_format"
            )
        return _json(schema)
    raise ApiError(
        400,
        f"{name}.type {kind!r} must be 'text', 'json_object' or 'json_schema'",
        param=name,
    )


def constraint_of(given: Mapping[str, Any] | None) -> str | None:
    """The rule of vLLM's structured_outputs: one of json, regex, choice, grammar (Lark)."""
    if given is None:
        return None
    if len(given) != 1 or not given.keys() <= _CONSTRAINTS.keys():
        raise ApiError(
            400,
            f"structured_outputs must have one of {', '.join(_CONSTRAINTS)}, not {[*given]}",
            param="structured_outputs",
        )
    ((kind, value),) = given.items()
    if kind == "json":
        schema = _parsed(value) if isinstance(value, str) else value
        if isinstance(schema, Mapping):
            return _json(schema)
    elif kind == "choice" and isinstance(value, list) and value:
        if all(isinstance(one, str) and one for one in value):
            return " | ".join(json.dumps(one) for one in value)
    elif kind == "regex" and isinstance(value, str) and value:
        return _regex(value)
    elif kind == "grammar" and isinstance(value, str) and value:
        return value
    raise ApiError(
        400,
        f"structured_outputs.{kind} {value!r} must be {_CONSTRAINTS[kind]}",
        param="structured_outputs",
    )


class CallRules:
    """Rules of tool calls in one format.

    special: text of a marker -> its token id, if it is a special token.
    """

    def __init__(self, tool_format: ToolFormat, special: Mapping[str, int]) -> None:
        self._format, self._special = tool_format, special

    def calls(
        self, tools: Sequence[Mapping[str, Any]], *, several: bool, is_begun: bool = False
    ) -> str:
        """One or several calls of these functions; is_begun: after the marker."""
        given = self._format
        terms: dict[str, str] = {}  # of texts: the expression -> its name
        one = "(" + " | ".join(self._call(tool, terms) for tool in tools) + ")"
        if given.is_bare:
            return one
        begin = marker_term(given.begin, self._special)
        first = "" if is_begun else begin
        if given.is_list:
            more = f'(", " {one})*' if several else ""
            return f'{first} "[" {one} {more} "]"'
        line = r'"\n"' if given.end else ""
        end = f"{line} {marker_term(given.end, self._special)}" if given.end else ""
        more = rf'("\n"? {begin} {line} {one} {end})*' if several else ""
        rules = "".join(f"\n{name}[lazy]: {term}" for term, name in terms.items())
        return f"{first} {line} {one} {end} {more}{rules}"

    def free(self, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
        """Any text, optionally followed by calls."""
        given = self._format
        if given.is_bare:
            return f"TEXT | {self.calls(tools, several=several)}\nTEXT: /[^{{](?s:.*)/"
        if given.begin in self._special:
            return f"TEXT | TEXT? {self.calls(tools, several=several)}\nTEXT: /(?s:.+)/"
        # The text before a call includes the marker; otherwise the lexer would read into it.
        marker = _escaped(given.begin)
        behind = self.calls(tools, several=several, is_begun=True)
        text = rf"/(?s:.*)/ & ~/(?s:.*){marker}(?s:.*)/"
        return f"TEXT | before {behind}\nTEXT: {text}\nbefore[lazy]: /(?s:.*){marker}/"

    def _call(self, tool: Mapping[str, Any], terms: dict[str, str]) -> str:
        if self._format.is_xml:
            return _xml_call(tool["name"], tool.get("parameters") or _ANY_OBJECT, terms)
        name, arguments = tool["name"], _json(tool.get("parameters") or _ANY_OBJECT)
        if self._format.is_named:
            return f"{json.dumps(name)} {marker_term('[ARGS]', self._special)} {arguments}"
        head = f'{{"name": {json.dumps(name)}, "{self._format.arguments}": '
        return f'{json.dumps(head)} {arguments} "}}"'


def _xml_call(name: str, parameters: Mapping[str, Any], terms: dict[str, str]) -> str:
    """A call with its parameters in the order of the schema; adds what it needs to `terms`."""
    whole, rules = members(parameters), []
    required = whole.get("required") or ()
    for parameter, schema in (whole.get("properties") or {}).items():
        begin = json.dumps(f"<parameter={parameter}>\n")
        rules.append(
            f"({begin} {_xml_value(schema, parameters, terms)})"
            + ("" if parameter in required else "?")
        )
    begin = json.dumps(f"<function={name}>\n")
    return f'{begin} {" ".join(rules)} "</function>"'


def _xml_value(schema: Any, parameters: Mapping[str, Any], terms: dict[str, str]) -> str:
    """A string as it is, anything else as JSON, then the end of the element."""
    if not is_text(schema, parameters):
        return f"{_json(with_definitions(schema, parameters))} {_XML_END}"
    found = texts(schema, parameters)
    listed = [choices(one) for one in found]
    if found and None not in listed:
        every = dict.fromkeys(text for some in listed for text in some or ())
        return f"({' | '.join(map(json.dumps, every))}) {_XML_END}"
    # One term up to the end of the element, as a lexer would read over an end that is a term.
    limited = [_limited(one) for one in found]
    if not found or "" in limited:
        term = rf"/(?s:.*){_XML_LAST}/"
    else:
        # A text too short for its schema must not go on after what looks like its end.
        within = r"~/(?s:.*)\n<\/parameter>(?s:.*)/"
        term = f"(({' | '.join(f'({one})' for one in limited)}) & {within}) /{_XML_LAST}/"
    return terms.setdefault(term, f"xml_text_{len(terms)}")


def _limited(schema: Mapping[str, Any]) -> str:
    """The texts of a schema, as a term; "" if any text will do."""
    listed = choices(schema)
    if listed is not None:
        return " | ".join(map(json.dumps, listed))
    least, most, pattern = (schema.get(name) for name in ("minLength", "maxLength", "pattern"))
    found = []
    if least or most is not None:
        found.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if isinstance(pattern, str):
        found.append(_regex("|".join(f"(?:{one})" for one in _branches(pattern))))
    return " & ".join(found)


def _branches(pattern: str) -> list[str]:
    """The alternatives of a schema's pattern, each as one that the whole text matches."""
    branches, depth, in_class = [""], 0, False
    for part in re.findall(r"(?s:\\?.)", pattern):
        if in_class or part == "[":
            in_class = part != "]"
        elif part in "()":
            depth += 1 if part == "(" else -1
        elif part == "|" and not depth:
            branches.append("")
            continue
        digits = _ASCII.get(part)
        branches[-1] += part if digits is None else digits if in_class else f"[{digits}]"
    found = []
    for branch in branches:
        is_end = re.search(r"(?<!\\)(?:\\\\)*\$$", branch) is not None
        first, last = "" if branch.startswith("^") else "(?s:.*)", "" if is_end else "(?s:.*)"
        found.append(f"{first}{branch.removeprefix('^')[: -1 if is_end else None]}{last}")
    return found


def grammar_of(
    answer: str,
    reasoning: Markers | None = None,
    special: Mapping[str, int] = MappingProxyType({}),
    *,
    is_inside: bool = False,
) -> str:
    """The whole grammar: the answer, after reasoning if the template marks it.

    answer: a rule, or a whole grammar, which then allows no reasoning.
    """
    if re.search(r"^\s*start\s*:", answer, re.MULTILINE):
        return answer
    if reasoning is None:
        return f"start: {answer}"
    if reasoning.end in special:
        thoughts = f"thoughts: /(?s:.*)/ {marker_term(reasoning.end, special)}"
    else:
        thoughts = f"thoughts[lazy]: /(?s:.*){_escaped(reasoning.end)}/"
    before = r'thoughts "\n"*'
    if not is_inside:
        before = f"({marker_term(reasoning.begin, special)} {before})?"
    return f"start: {before} answer\n{thoughts}\nanswer: {answer}"


def marker_term(marker: str, special: Mapping[str, int]) -> str:
    """A marker in a rule: a special token by its id, others by their text."""
    return f"<[{special[marker]}]>" if marker in special else json.dumps(marker)


def _json(schema: Mapping[str, Any]) -> str:
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": JSON_WHITESPACE} | (own if isinstance(own, dict) else {})
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _regex(pattern: str) -> str:
    # Escapes are read as a whole: a slash after two backslashes is not escaped.
    special = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    escaped = re.sub(r"(?s:\\.)|/|\n", lambda found: special.get(found[0], found[0]), pattern)
    return f"/{escaped}/"


def _escaped(text: str) -> str:
    """A string as a regular expression between slashes."""
    return re.sub(r"([\\^$.|?*+()\[\]{}/])", r"\\\1", text)

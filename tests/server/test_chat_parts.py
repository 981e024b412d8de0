"""Reasoning and calls of tools in a text that comes in pieces of any size."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.engine.sequence import Piece
from keyhole.server.chat import tool_parser
from keyhole.server.chat.reply import ReasoningSplitter, Reply, markers_of
from keyhole.server.chat.tool_parser import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    QWEN3_CODER,
    CallArguments,
    ToolCallParser,
    ToolFormat,
    XmlToolCallParser,
    format_of,
)
from tests.checkpoints import make_tokenizer

THINK = markers_of("... </think> ...")
Calls = list[tuple[str, str]]

#: Format, text of the model, what is text for the user, and the calls.
REPLIES: list[tuple[ToolFormat, str, str, Calls]] = [
    (HERMES, "no call at all < tool", "no call at all < tool", []),
    (
        HERMES,
        'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{"}}\n</tool_call>',
        "Let me look.",
        [("f", '{"a": "}\\"{"}')],
    ),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "g", "arguments": {"x": [1, {"y": 2}]}}\n</tool_call>\n',
        "",
        [("f", "{}"), ("g", '{"x": [1, {"y": 2}]}')],
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        LLAMA3,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
        "",
        [("f", "{}"), ("g", '{"b": 2}')],
    ),
    (LLAMA3, 'A set is written {"name"}.', 'A set is written {"name"}.', []),
    (LLAMA3, '{"city": "Oslo"}', '{"city": "Oslo"}', []),
    (
        LLAMA3,
        '{"name": "nobody", "parameters": {"a": 1}}',
        '{"name": "nobody", "parameters": {"a": 1}}',
        [],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        MISTRAL_NAMED,
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    # A call of a name that no tool has was shown with all that had arrived, calls included.
    (
        HERMES,
        '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> \n',
        '{"name": "h", "arguments": {}}\n</tool_call>',
        [("f", "{}")],
    ),
    # A name that is not JSON failed the answer.
    (
        HERMES,
        '<tool_call>{"name": "f\\x", "arguments": {}}</tool_call>',
        '{"name": "f\\x", "arguments": {}}</tool_call>',
        [],
    ),
]


#: As above, for the form with elements: what is a text and what is not, the schema tells.
XML_FUNCTIONS: Any = {
    "f": {
        "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}}
    },
    "g": {"properties": {"x": {"type": ["array", "null"]}, "o": {"type": "object"}}},
    # As pydantic writes an optional number, an enum, a model and an optional string.
    "p": {
        "properties": {
            "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "e": {"enum": [1, 2]},
            "m": {"$ref": "#/$defs/Model"},
            "s": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"Model": {"properties": {"k": {"type": "integer"}}, "type": "object"}},
    },
    "r": {"$ref": "#/$defs/R", "$defs": {"R": {"properties": {"n": {"type": "integer"}}}}},
}
XML_REPLIES: list[tuple[str, str, Calls]] = [
    ("no call <tool at all", "no call <tool at all", []),
    (
        "Let me look.\n<tool_call>\n<function=f>\n<parameter=a>\nif x < 3:\n    y()\n</parameter>\n"
        "<parameter=n>\n12\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "Let me look.",
        [("f", '{"a": "if x < 3:\\n    y()", "n": 12, "b": true}')],
    ),
    (
        "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n"
        '<parameter=x>\n[1, "2"]\n</parameter>\n<parameter=o>{"k": 3}</parameter>\n'
        "</function>\n</tool_call>\n",
        "",
        [("f", "{}"), ("g", '{"x": [1, "2"], "o": {"k": 3}}')],
    ),
    # Without the first marker, and with a number that is none.
    (
        "<function=f><parameter=n>many</parameter><parameter=q>7</parameter></function>",
        "",
        [("f", '{"n": "many", "q": "7"}')],
    ),
    (
        "<function=p><parameter=n>3</parameter><parameter=e>1</parameter>"
        '<parameter=m>{"k": 3}</parameter><parameter=s>4</parameter></function>',
        "",
        [("p", '{"n": 3, "e": 1, "m": {"k": 3}, "s": "4"}')],
    ),
    ("<function=p><parameter=n>None</parameter></function>", "", [("p", '{"n": null}')]),
    # A text with the end of an element in it was cut off there, and the call had no end.
    (
        "<function=f><parameter=a>\n<parameter=n>\n1</parameter>, 2\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n</function>",
        "",
        [("f", '{"a": "<parameter=n>\\n1</parameter>, 2", "n": 3}')],
    ),
    # The schema of all parameters is a name, as pydantic writes it for a recursive model.
    ("<function=r><parameter=n>3</parameter></function>", "", [("r", '{"n": 3}')]),
    # JSON has no such number.
    ("<function=f><parameter=n>1e999</parameter></function>", "", [("f", '{"n": "1e999"}')]),
    ("<tool_call>\n<function=f>\n<parameter=a>\nx", "", [("f", "")]),
    ("<tool_call>\n<function=h>\n</function>", "<function=h>\n</function>", []),
    # A call of a name that no tool has was shown with all that had arrived, calls included.
    (
        "<tool_call>\n<function=h>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=f>\n</function>\n</tool_call>\n",
        "<function=h>\n</function>\n</tool_call>",
        [("f", "{}")],
    ),
    # Spaces that came alone were lost after a call.
    ("<function=f>\n</function>It is 1 2 3.", "It is 1 2 3.", [("f", "{}")]),
]


def pieces(text: str, cuts: list[int]) -> list[Piece]:
    places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    done: Any = object()
    return [
        Piece(text=part, token_ids=[0], result=done if n == len(parts) - 1 else None)
        for n, part in enumerate(parts)
    ]


def streamed(reply: Reply, given: list[Piece]) -> dict[str, Any]:
    """What a client puts together from the deltas."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    for piece in given:
        delta = reply.delta(reply.add(piece))
        found["content"] += delta.get("content", "")
        found["reasoning"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            entry = found["calls"].setdefault(call["index"], ["", ""])
            entry[0] += call["function"].get("name", "")
            entry[1] += call["function"]["arguments"]
    found["calls"] = [tuple(call) for call in found["calls"].values()]
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("form", "text", "shown", "calls"), REPLIES)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_calls_are_found_however_the_text_is_cut(
    form: ToolFormat, text: str, shown: str, calls: Calls, cuts: list[int]
) -> None:
    reply = Reply(parser=ToolCallParser(form, {"f", "g"}))
    found = streamed(reply, pieces(text, cuts))
    assert (found["content"], found["calls"]) == (shown, calls)
    assert (reply.text, [(call.name, call.arguments) for call in reply.calls]) == (shown, calls)
    assert reply.finish_reason("stop") == ("tool_calls" if calls else "stop")
    assert len({call.id for call in reply.calls}) == len(calls)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("text", "shown", "calls"), XML_REPLIES)
@given(cuts=st.lists(st.integers(0, 250), max_size=12))
def test_calls_as_elements_are_found_however_the_text_is_cut(
    text: str, shown: str, calls: Calls, cuts: list[int]
) -> None:
    reply = Reply(parser=XmlToolCallParser(XML_FUNCTIONS))
    found = streamed(reply, pieces(text, cuts))
    assert (found["content"], found["calls"]) == (shown, calls)
    assert (reply.text, [(call.name, call.arguments) for call in reply.calls]) == (shown, calls)


def test_values_that_are_nested_too_deeply_are_no_failure() -> None:
    deep = "[" * 200_000 + "]" * 200_000  # Python 3.13 reads tens of thousands
    text = f'{{"arguments": {deep}, "name": "f"}}'
    assert "".join(map(str, ToolCallParser(LLAMA3, {"f"}).feed(text, final=True))) == text
    call = f"<function=g><parameter=x>{deep}</parameter></function>"
    *_, value, end = XmlToolCallParser(XML_FUNCTIONS).feed(call, final=True)
    assert (value, end) == (CallArguments(0, f'{{"x": "{deep}"'), CallArguments(0, "}"))


def test_a_long_object_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of an answer in JSON was read with all that came before: seconds of a server."""
    read = 0
    end_of = tool_parser._JsonScan.end_of

    def counted(scan: Any, text: str) -> int | None:
        nonlocal read
        read += len(text)
        return end_of(scan, text)

    monkeypatch.setattr(tool_parser._JsonScan, "end_of", counted)
    text, parser = f'{{"items": "{"a" * 3000}"}}', ToolCallParser(LLAMA3, {"f"})
    shown = [event for letter in text for event in parser.feed(letter)]
    assert "".join(map(str, shown)) == text
    assert read == len(text)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("text", "is_inside", "reasoning", "answer"),
    [
        ("<think>\nhm, <b\n</think>\n\nOslo.", False, "\nhm, <b\n", "Oslo."),
        ("hm</think>Oslo", True, "hm", "Oslo"),
        ("never ends </thin", True, "never ends </thin", ""),
        ("Oslo <think> is a town", False, "", "Oslo <think> is a town"),
        ("<thing>", False, "", "<thing>"),
        ("  <think>a</think>b</think>", False, "a", "b</think>"),
        ("", False, "", ""),
    ],
)
@given(cuts=st.lists(st.integers(0, 60), max_size=8))
def test_reasoning_is_split_off_however_the_text_is_cut(
    text: str, is_inside: bool, reasoning: str, answer: str, cuts: list[int]
) -> None:
    assert THINK is not None
    reply = Reply(splitter=ReasoningSplitter(THINK, is_inside=is_inside))
    found = streamed(reply, pieces(text, cuts))
    assert (found["reasoning"], found["content"]) == (reasoning, answer)
    assert (reply.reasoning, reply.text) == (reasoning, answer)
    assert bool(reply.reasoning_tokens) == bool(reasoning)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("sizes", [[1] * 40, [7, 19, 14], [40], [30, 0, 10]])
def test_tokens_of_reasoning_end_with_it(sizes: list[int], is_inside: bool) -> None:
    """All tokens of the piece in which it ended were counted: with a draft, or at a busy server."""
    assert THINK is not None
    tokenizer = make_tokenizer()
    text = f"{'' if is_inside else '<think>'}hm</think>\n\n".ljust(40, "a")
    reply = Reply(ReasoningSplitter(THINK, is_inside=is_inside), tokenizer=tokenizer)
    start = 0
    for size in sizes:
        part = text[start : start + size]
        ids = tokenizer.encode(part, add_special_tokens=False)
        reply.add(Piece(text=part, token_ids=ids))
        start += size
    assert reply.reasoning == "hm"
    assert reply.reasoning_tokens == text.index("\n")


def test_tokens_of_reasoning_whose_text_came_late() -> None:
    """A text that might have become a stop text is held back."""
    assert THINK is not None
    tokenizer = make_tokenizer()
    reply = Reply(ReasoningSplitter(THINK, is_inside=True), tokenizer=tokenizer)
    for tokens, shown in (("hm</think>x", "hm"), ("yz", ""), ("!", "</think>xyz!")):
        ids = tokenizer.encode(tokens, add_special_tokens=False)
        reply.add(Piece(text=shown, token_ids=ids))
    assert reply.reasoning_tokens == len("hm</think>")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call>\\n{...}\\n</tool_call> ...", HERMES),
        ("... <tool_call>\\n<function=f>\\n<parameter=p> ...", QWEN3_CODER),
        ("... [TOOL_CALLS][ ...", MISTRAL),
        ("... [TOOL_CALLS]{{ name }}[ARGS] ...", MISTRAL_NAMED),
        ("... {{- '\"parameters\": ' }} ...", LLAMA3),
        ("{{ messages }}", None),
    ],
)
def test_a_template_tells_its_format(template: str, form: ToolFormat | None) -> None:
    assert format_of(template) is form

"""How the common chat templates write a tool call."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.errors import UnknownNameError


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A format of tool calls.

    begin, end: around each call, or around all of them. arguments: the key next to "name".
    is_list: the calls of a reply are one JSON list. is_named: a call is its name, "[ARGS]" and the
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
    """The format in a chat template; None: none that we know."""
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

"""Chat templates as those of well-known models, shortened to what a test needs."""

from __future__ import annotations

_MESSAGES = (
    "{%- for message in messages %}[{{ message.role }}]{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}CALL%s{%- endfor %}\n{% endfor %}"
    "{%- if add_generation_prompt %}[assistant]{% endif %}"
)
_BY_NAME = '{"name": "{{ call.function.name }}", "%s": {{ call.function.arguments | tojson }}}'


def _template(tools: str, call: str) -> str:
    return (
        "{%- if tools %}"
        + tools
        + "{{ tools | length }}{%- endif %}"
        + _MESSAGES.replace("CALL%s", call)
    )


#: As Qwen's and those of NousResearch.
HERMES = _template(
    "Write <tool_call>\n{...}\n</tool_call> for ",
    "<tool_call>" + _BY_NAME.replace("%s", "arguments") + "</tool_call>",
)
#: As Qwen3-Coder's.
QWEN3_CODER = _template(
    "Write <tool_call>\n<function=...>\n<parameter=...>\n</function>\n</tool_call> for ",
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{%- for name, value in call.function.arguments.items() %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{%- endfor %}</function>\n</tool_call>",
)
#: As Llama 3's.
LLAMA3 = _template(
    "Write {'name': ..., \"parameters\": ...} for ", _BY_NAME.replace("%s", "parameters")
)
#: As Mistral's.
MISTRAL = _template(
    "[AVAILABLE_TOOLS]", "[TOOL_CALLS][" + _BY_NAME.replace("%s", "arguments") + "]"
)
#: As Qwen3's: the model writes the marker itself.
REASONING = HERMES + "{# <think> ... </think> #}"
#: As DeepSeek-R1's: the prompt ends with the marker.
REASONING_BEGUN = HERMES + "{%- if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"

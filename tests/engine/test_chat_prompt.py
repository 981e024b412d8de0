"""What a conversation may be made of, and what is refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keyhole import LLM, AsyncLLM, RequestError, SamplingParams
from keyhole.tokenization import chat_text
from tests.checkpoints import make_tokenizer

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}<{{ tool.function.name }}>{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' and not message.tool_call_id %}"
    "{{ raise_exception('a tool message needs tool_call_id') }}{% endif %}"
    "[{{ message.role }}]{{ message.content or message.tool_calls[0].name }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
USER = {"role": "user", "content": "sum"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def tokenizer() -> object:
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    return made


def test_system_prompts_parts_of_text_and_tool_calls_reach_the_template(tokenizer: object) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
    ]
    found = chat_text(tokenizer, messages, [TOOL], {"enable_thinking": True})
    assert found == "<add>[system]be brief[user]one\ntwo[assistant]add[tool]3[assistant]<think>"
    assert chat_text(tokenizer, [USER]) == "[user]sum[assistant]"


def test_every_chat_takes_them(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "sum"}]}]
    wanted = llm.chat([USER], GREEDY).prompt_token_ids
    assert llm.chat(parts, GREEDY).prompt_token_ids == wanted
    assert asyncio.run(AsyncLLM(llm).chat(parts, GREEDY)).prompt_token_ids == wanted
    for settings in ({"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}):
        name = next(iter(settings.get("chat_template_kwargs", settings)))
        with pytest.raises(RequestError, match=f"chat template does not use '{name}'"):
            llm.stream_chat([USER], GREEDY, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "is empty"),
        (USER, "is dict, not a list"),
        ("hello", "is str, not a list"),
        (["hello"], "must have 'content' and a 'role'"),
        ([{"role": ["user"], "content": "hello"}], "a 'role' that is a string"),
        ([{"role": "user", "content": None}], "a string or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url", "url": "x"}]}], "type 'image_url'"),
        ([{"role": "user", "content": [7]}], "type 'int'"),
        (
            [{"role": "tool", "content": "3"}],
            "chat template rejects the conversation: a tool message needs",
        ),
    ],
)
def test_what_is_no_conversation_is_one_line(
    tokenizer: object, messages: object, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as found:
        chat_text(tokenizer, messages)  # type: ignore[arg-type]
    assert "\n" not in str(found.value)


def test_a_template_that_writes_parts_only_gets_parts(tokenizer: Any) -> None:
    """LLaVA's writes nothing of a content that is a plain text."""
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: "
        "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>"
        "{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ part['text'] }}{% endfor %}; {% endfor %}"
    )
    said = [USER, {"role": "assistant", "content": "Yes."}]
    assert chat_text(tokenizer, said) == "user: sum; assistant: Yes.; "


def test_a_template_may_fail_in_any_way(tokenizer: Any) -> None:
    """Only some of Python's errors were expected of it."""
    tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(RequestError, match="rejects the conversation: division by zero"):
        chat_text(tokenizer, [USER])


def test_several_templates_of_which_none_is_the_default_are_named(tokenizer: Any) -> None:
    tokenizer.chat_template = {"rag": TEMPLATE, "tool_use": TEMPLATE}
    with pytest.raises(RequestError, match="for 'rag', 'tool_use', and none that is called 'def"):
        chat_text(tokenizer, [USER])

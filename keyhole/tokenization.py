"""Text to token ids and back: prompts, chat templates, incremental detokenization."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from keyhole.config import is_count, is_several
from keyhole.errors import RequestError, first_line, one_line

#: Text, token ids, or {"prompt_token_ids": token ids}.
Prompt = str | Sequence[int] | Mapping[str, Sequence[int]]

#: One prompt, or several in any mixture of forms.
Prompts = Prompt | Iterable[Prompt]

_RIGHT = "text, a list of token ids, or {'prompt_token_ids': [...]}"


def one_or_several(prompts: Prompts) -> tuple[bool, list[Any]]:
    """Whether this is one prompt, and the prompts as a list. A list of numbers is one prompt.

    RequestError for what can be neither.
    """
    if isinstance(prompts, str | Mapping):
        return True, [prompts]
    if not is_several(prompts):
        raise RequestError(f"a prompt must be {_RIGHT}, or a list of these, not {_named(prompts)}")
    several = list(prompts)
    if several and all(is_count(one, -(2**63)) for one in several):
        return True, [several]
    return False, several


def given_ids(what: str, given: object) -> list[int] | None:
    """The ids of a list, or of {"prompt_token_ids": [...]}; None for text.

    RequestError for anything else; `what` names it ("a prompt").
    """
    if isinstance(given, str):
        return None
    if isinstance(given, Mapping):
        if set(given) != {"prompt_token_ids"}:
            raise RequestError(
                f"{what} given as a dict must have only the key 'prompt_token_ids', not "
                f"{list(given)}"
            )
        given = given["prompt_token_ids"]
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise RequestError(f"{what} must be {_RIGHT}, not {_named(given)}")
    for token in given:
        # The first is faster, and long prompts have many tokens.
        if type(token) is not int and not is_count(token, -(2**63)):
            raise RequestError(f"token id {token!r} of {what} must be a whole number")
    return [int(token) for token in given]


def encode_text(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids of a text, with the tokenizer's special tokens or without.

    RequestError where there is no tokenizer, and for what is no Unicode text.
    """
    if tokenizer is None:
        raise RequestError(
            "this model has no tokenizer; give token ids, {'prompt_token_ids': [...]} or "
            "--prompt-ids, or LLM(tokenizer=...)"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate, {text[error.start]!r}, at position {error.start}, "
            "which is not valid Unicode; decode the text with its own encoding"
        ) from error
    try:
        return [int(token) for token in tokenizer(text, add_special_tokens=special).input_ids]
    except Exception as error:  # some files of a tokenizer fail only when they are used
        raise RequestError(
            f"the tokenizer fails on the text: {one_line(error)}; correct its files, or give "
            "tokenizer= another folder"
        ) from error


def word_ids(tokenizer: Any, words: Iterable[str], vocab_size: int) -> list[list[int]]:
    """Token ids of words at the beginning of a text, and after a space.

    Without those that a model of `vocab_size` tokens cannot write, of which its tokenizer may have
    more.
    """
    if tokenizer is None:
        return []
    forms = [form for word in words for form in (word, f" {word.lstrip()}")]
    found = [encode_text(tokenizer, form, special=False) for form in forms]
    return [ids for ids in found if ids and max(ids) < vocab_size]


def _named(given: object) -> str:
    """None, or the type of what was given."""
    return "None" if given is None else type(given).__name__


def character_spans(tokenizer: Any, text: str) -> list[tuple[int, int]] | None:
    """First character and end of each token of `encode_text` without special ones.

    None where the tokenizer does not know.
    """
    if tokenizer is None or not tokenizer.is_fast:
        return None
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [(int(start), int(end)) for start, end in found["offset_mapping"]]


#: One message: "role", "content" (text, or a list of parts of text), and fields for the template.
Message = Mapping[str, Any]

#: What a model may call: a JSON schema as OpenAI has it, or a Python function with a docstring.
Tool = Mapping[str, Any] | Callable[..., Any]


#: Arguments of `apply_chat_template` that are not settings of the template.
_OF_CONVERSATIONS = {
    *("conversation", "messages", "tools", "chat_template", "tokenize", "add_generation_prompt")
}


def _template(tokenizer: Any, tools: Sequence[Tool] | None) -> str:
    """The chat template that transformers uses; RequestError if there is none."""
    if tokenizer is None or not tokenizer.chat_template:
        raise RequestError("this model has no chat template; use generate with a prompt")
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError as error:  # several, and none is the default
        raise RequestError(
            f"this model has chat templates for {', '.join(map(repr, tokenizer.chat_template))}, "
            "and none that is called 'default'; name one of them so in its tokenizer_config.json"
        ) from error


def chat_text(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation, up to where the next message begins.

    settings: what else the template knows, such as {"enable_thinking": False}. RequestError for
    what is not a conversation, for parts that are not text, and for what the template does not
    know: it would ignore it.
    """
    listed = is_several(messages) and not isinstance(messages, Mapping)
    several = [*messages] if listed else None
    if not several:
        what = "empty" if several == [] else f"{_named(messages)}, not a list"
        raise RequestError(f"the conversation is {what}; give at least one message in a list")
    plain = [_plain(message) for message in several]
    named = settings is None or isinstance(settings, Mapping)
    if not named or not all(isinstance(name, str) for name in settings or ()):
        raise RequestError(
            f"chat_template_kwargs {settings!r} must be a dict of what the template knows, such "
            "as {'enable_thinking': False}",
            field="chat_template_kwargs",
        )
    template = _template(tokenizer, tools)
    for name in sorted(_OF_CONVERSATIONS & (settings or {}).keys()):
        raise RequestError(
            f"{name!r} cannot be given to a chat template; leave it out",
            field="chat_template_kwargs",
        )
    for name in [*(["tools"] if tools else []), *(settings or {})]:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise RequestError(
                f"this model's chat template does not use {name!r}; leave it out",
                field="tools" if name == "tools" else "chat_template_kwargs",
            )

    def written(conversation: list[dict[str, Any]]) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    conversation,
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=True,
                    **(settings or {}),
                )
            )
        except RecursionError:  # of the values, not of the template
            raise
        except Exception as error:  # a template is a program: it may fail in any way
            raise RequestError(
                f"this model's chat template rejects the conversation: {first_line(error)}"
            ) from error

    text = written(plain)
    if "image" not in template or _has_all(text, plain):
        return text
    # Some templates of models of images and text write parts only, and nothing of a plain text.
    in_parts = written([_in_parts(message) for message in plain])
    return in_parts if _has_all(in_parts, plain) else text


def _has_all(text: str, messages: Sequence[Message]) -> bool:
    """Whether the text of the conversation contains the contents of all messages."""
    return all(str(message["content"] or "").strip() in text for message in messages)


def _in_parts(message: Message) -> dict[str, Any]:
    """The message with its content as a list of one part."""
    if message["content"] is None:
        return dict(message)
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _plain(message: object) -> dict[str, Any]:
    """A message whose content is one text; one that calls tools may have none."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"a message must have 'content' and a 'role' that is a string, not {message!r}"
        )
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "\n".join(_text(part) for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError(
            "a message must have a string or a list of text parts as its 'content', unlike "
            f"{message!r}"
        )
    return {**message, "content": content}


def _text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f"a message has a part of type {kind!r}, but only text is supported; give "
            "{'type': 'text', 'text': ...}"
        )
    return str(part["text"])


#: What a tokenizer gives for bytes that do not make a character yet.
_INCOMPLETE = "\ufffd"


#: The letters in which byte-level tokenizers write bytes, as in GPT-2: a printable byte as itself,
#: the others as letters from U+0100 on.
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_LETTERS = {chr(byte): byte for byte in _PLAIN} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(0x100)} - {*_PLAIN}))
}


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """The bytes of a token that alone decodes to `text`, also if they are a part of a character.

    UTF-8 of the text where it is not known how the tokenizer writes bytes.
    """
    if tokenizer is None or _INCOMPLETE not in text:
        return text.encode()
    name = str(tokenizer.convert_ids_to_tokens(token))
    if found := re.fullmatch("<0x([0-9A-Fa-f]{2})>", name):  # SentencePiece's byte fallback
        return bytes.fromhex(found[1])
    if all(letter in _LETTERS for letter in name):
        return bytes(_LETTERS[letter] for letter in name)
    return text.encode()


class Detokenizer:
    """Turns a growing list of tokens into text.

    The text of a token may depend on its neighbours (spaces, bytes of one character), so the text
    of the last few tokens is decoded again with each new one, and the difference is new. Where no
    stop text has to be found at once, tokens wait until the text is read: a step with
    many sequences then decodes nothing.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), *, skip_special: bool = True
    ) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stop = tuple(stop)
        self._text = ""
        self._tokens = array("i")  # those that still matter for the text to come
        self._dropped = 0  # how many were before these
        self._done = 0  # how many of these are in the text
        self._given = 0  # characters handed out

    @property
    def num_tokens(self) -> int:
        """How many it has taken."""
        return self._dropped + len(self._tokens)

    @property
    def text(self) -> str:
        """Of all complete characters; up to a stop text, without it."""
        self._catch_up(final=False)
        return self._text

    def append(self, token: int) -> None:
        """Takes one more token; sets `stopped` when a stop text is complete."""
        self._tokens.append(token)
        if self._stop:
            self._catch_up(final=False)

    def finish(self) -> None:
        """Adds what is left, complete characters or not."""
        self._catch_up(final=True)

    def take(self, *, final: bool) -> str:
        """New text since the last call; holds back what may become a stop text, unless final."""
        end = len(self.text)
        if not final and not self.stopped:
            end -= self._held_back()
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _catch_up(self, *, final: bool) -> None:
        if self._tokenizer is None or self.stopped or self._done == len(self._tokens):
            return
        known, text = self._decode(self._tokens[: self._done]), self._decode(self._tokens)
        if not final and (text.endswith(_INCOMPLETE) or len(text) <= len(known)):
            return
        start = len(self._text)
        self._text += text[len(known) :]
        del self._tokens[: self._done]
        self._dropped += self._done
        self._done = len(self._tokens)
        self._cut(start)

    def _decode(self, tokens: array[int]) -> str:
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=self._skip_special))

    def _cut(self, start: int) -> None:
        longest = max(map(len, self._stop), default=0)
        found = [self._text.find(stop, max(0, start - longest + 1)) for stop in self._stop]
        found = [place for place in found if place >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True

    def _held_back(self) -> int:
        """Characters at the end of the text that a stop text begins with."""
        most = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), most, -1):
                if self._text.endswith(stop[:size]):
                    most = size
                    break
        return most

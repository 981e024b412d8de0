"""Text to token ids, wherever a user may give either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keyhole.errors import RequestError

#: Text, or {"prompt_token_ids": [...]}.
Prompt = str | Mapping[str, Sequence[int]]


def given_ids(what: str, given: object) -> list[int] | None:
    """The ids of {"prompt_token_ids": [...]}, None for text.

    RequestError for anything else; `what` names it ("a prompt").
    """
    if isinstance(given, str):
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f"{what} is text or a dict of token ids, not {type(given).__name__}")
    if set(given) != {"prompt_token_ids"}:
        raise RequestError(
            f"{what} as a dict has the one key 'prompt_token_ids', not {list(given)}"
        )
    return [int(token) for token in given["prompt_token_ids"]]


def encode_text(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids of a text, with the tokenizer's special tokens or without.

    RequestError where there is no tokenizer.
    """
    if tokenizer is None:
        raise RequestError("this model has no tokenizer; give {'prompt_token_ids': [...]}")
    return [int(token) for token in tokenizer(text, add_special_tokens=special).input_ids]

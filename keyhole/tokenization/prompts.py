"""Text to token ids, wherever a user may give either."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keyhole.config import is_count
from keyhole.errors import RequestError

#: Text, token ids, or {"prompt_token_ids": token ids}.
Prompt = str | Sequence[int] | Mapping[str, Sequence[int]]

#: A prompt, or several, mixed as one likes.
Prompts = Prompt | Iterable[Prompt]

_RIGHT = "text, a list of token ids, or {'prompt_token_ids': [...]}"


def one_or_several(prompts: Prompts) -> tuple[bool, list[Any]]:
    """Whether this is one prompt, and the prompts as a list. A list of numbers is one prompt.

    RequestError for what can be neither.
    """
    if isinstance(prompts, str | Mapping):
        return True, [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise RequestError(f"a prompt is {_RIGHT}, or a list of these, not {_named(prompts)}")
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
                f"{what} as a dict has the one key 'prompt_token_ids', not {list(given)}"
            )
        given = given["prompt_token_ids"]
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise RequestError(f"{what} is {_RIGHT}, not {_named(given)}")
    for token in given:
        if not is_count(token, -(2**63)):
            raise RequestError(f"token id {token!r} of {what} must be a whole number")
    return [int(token) for token in given]


def encode_text(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids of a text, with the tokenizer's special tokens or without.

    RequestError where there is no tokenizer, and for what is no Unicode text.
    """
    if tokenizer is None:
        raise RequestError(
            "this model has no tokenizer; give {'prompt_token_ids': [...]} or LLM(tokenizer=...)"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has half a character, {text[error.start]!r}, at place {error.start}: a lone "
            "surrogate is no Unicode text; read it again with the right encoding"
        ) from error
    return [int(token) for token in tokenizer(text, add_special_tokens=special).input_ids]


def word_ids(tokenizer: Any, words: Iterable[str]) -> list[list[int]]:
    """Token ids of words as they stand in a text: at its beginning, and after a space."""
    if tokenizer is None:
        return []
    forms = [form for word in words for form in (word, f" {word.lstrip()}")]
    return [ids for form in forms if (ids := encode_text(tokenizer, form, special=False))]


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

"""The prompt of a question over stored documents, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from keyhole.config import is_several
from keyhole.documents.store import StoredDocument
from keyhole.engine.documents.filling import Context
from keyhole.engine.documents.library import Documents
from keyhole.engine.engine import Engine
from keyhole.errors import RequestError
from keyhole.reuse.base import Reuse
from keyhole.tokenization import Prompt, encode_text, given_ids

# A placeholder for the documents in a chat message, which no template changes.
_MARK = "\x00documents\x00"


@dataclass(frozen=True)
class DocumentPrompt:
    """A request over documents: its prompt, and the positions of the documents in it.

    context: None for a method that computes the prompt like any other.
    """

    tokens: list[int]
    context: Context | None


def assemble(
    engine: Engine,
    documents: Documents,
    names: Sequence[str],
    question: Prompt,
    reuse: Reuse,
    stack: ExitStack,
    *,
    prefix: Prompt = "",
    separator: Prompt = "",
    chat: bool = False,
) -> DocumentPrompt:
    """The prompt: prefix, documents in order with a separator between them, question.

    Every part is tokenised by itself, so that the stored tokens stay unchanged. Documents stay open
    until `stack` is closed; if the caller does not hold the engine's lock, other threads' steps
    continue while they are opened. chat: prefix, documents and question are the user's message of
    the model's chat template. With `Reuse.document_limit` only as many documents are opened and
    placed.
    """
    tokenizer = engine.model.tokenizer
    if not (question.strip() if isinstance(question, str) else given_ids("a question", question)):
        raise RequestError("the question is empty; ask something", field="prompt")
    if is_several(names):
        names = [*names]  # of an iterator, or an array
    if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
        raise RequestError(
            f"documents {names!r} must be a list of at least one stored name", field="documents"
        )
    if reuse.document_limit is not None and len(set(names)) > reuse.document_limit:
        names = documents.choose(_text_of(tokenizer, question), names, reuse.document_limit)
    each = [*dict.fromkeys(names)]  # a name that occurs twice is opened once
    opened: dict[str, StoredDocument] = {}
    for document in documents.open_all(each, with_head=not reuse.exact):
        opened[document.info.name] = stack.enter_context(document)
    with engine.lock:  # no two threads at once in the tokenizer
        if chat:
            prefix, question = _in_chat(tokenizer, prefix, question)
        begin = _prefix(tokenizer, prefix, special=not chat)
        between = _plain(tokenizer, "a separator", separator)
        asked = _plain(tokenizer, "a question", question)
    tokens, offsets = list(begin), []
    for i, name in enumerate(names):
        if i:
            tokens += between
        offsets.append(len(tokens))
        tokens += opened[name].token_ids.tolist()
    end = len(tokens)
    tokens += asked
    if reuse.exact:
        return DocumentPrompt(tokens, None)
    every = tuple(opened[name] for name in names)
    context = Context(every, tuple(offsets), end, len(begin), reuse, documents.adapter)
    return DocumentPrompt(tokens, context)


def _text_of(tokenizer: Any, question: Prompt) -> str:
    """The text that documents are compared with."""
    ids = given_ids("a question", question)
    if ids is None:
        return str(question)
    if tokenizer is None:
        raise RequestError(
            "max_documents compares documents with the text of the question, but this model has "
            "no tokenizer; leave it out"
        )
    return str(tokenizer.decode(ids))


def _in_chat(tokenizer: Any, prefix: Prompt, question: Prompt) -> tuple[str, str]:
    if tokenizer is None or not tokenizer.chat_template:
        raise RequestError("this model has no chat template; leave chat out")
    if not isinstance(prefix, str) or not isinstance(question, str):
        raise RequestError("with chat, prefix and question must be text, not token ids")
    message = {"role": "user", "content": f"{prefix}{_MARK}{question}"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, mark, after = text.partition(_MARK)
    if not mark:
        raise RequestError("this model's chat template changes messages; leave chat out")
    return before, after


def _prefix(tokenizer: Any, prefix: Prompt, *, special: bool) -> list[int]:
    """The prefix with the tokenizer's BOS tokens, and without its EOS tokens."""
    ids = given_ids("a prefix", prefix)
    if ids is not None or tokenizer is None:
        return ids or []
    tokens = encode_text(tokenizer, str(prefix), special=special)
    if tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens.pop()
    return tokens


def _plain(tokenizer: Any, what: str, text: Prompt) -> list[int]:
    """Token ids without special ones."""
    ids = given_ids(what, text)
    if ids is None:
        ids = encode_text(tokenizer, str(text), special=False) if text else []
    return ids

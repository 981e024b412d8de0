"""Answers as OpenAI's objects, with the engine's counters in the usage, and what was read."""

from __future__ import annotations

import dataclasses
import statistics
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from pydantic_core import to_json
from tokenizers.decoders import DecodeStream

from keyhole.engine.sequence import Piece, Result, Stats
from keyhole.server.chat.reply import Reply
from keyhole.server.errors import ApiError
from keyhole.tokenization import Detokenizer, token_bytes

#: The passages that a prompt used of each of its documents.
_Documents = list[dict[str, Any]]
#: Counters of an answer: those of several completions are added, or averaged.
_ADDED = ("kv_bytes_read", "other_bytes_read", "moved_bytes", "store_bytes_read", "evicted_pages")
_MEAN = (
    *("attended_fraction", "hit_rate", "offloaded_layers", "sequence_ratio", "recompute_ratio"),
    *("held_ratio", "accepted_length", "acceptance_rate", "prompt_attended_fraction"),
)


class AnyAnswer(Protocol):
    """The interface of all answers, which are sent whole or as a stream of events."""

    def take(self, index: int, piece: Piece) -> None:
        """Keeps a piece for `whole`."""

    def whole(
        self, results: Sequence[Result], documents: _Documents | None = None
    ) -> dict[str, Any]:
        """The whole answer, once all pieces have been taken."""
        ...

    def begin(self) -> list[dict[str, Any]]:
        """The events before the first piece of a stream."""
        ...

    def piece(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        """The events of a piece; first: the first one of this completion."""
        ...

    def closing(
        self, results: Sequence[Result], documents: _Documents | None, *, wants_usage: bool
    ) -> list[dict[str, Any]]:
        """The events after the last piece."""
        ...

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event that ends a stream with an error."""
        ...

    def frame(self, event: dict[str, Any]) -> bytes:
        """An object as a server-sent event."""
        ...

    @property
    def end(self) -> bytes:
        """The last event of a stream."""
        ...


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer of chat or completions, with the id that all of its pieces share.

    kind: such as "chat.completion". replies: of a chat, one per completion. n: completions per
    prompt. top_logprobs: of a chat, how many tokens are listed for each place. offsets: without a
    chat, one per completion.
    """

    kind: str
    model: str
    tokenizer: Any = None
    replies: Sequence[Reply] = ()
    n: int = 1
    top_logprobs: int = 0
    offsets: Sequence[TextOffsets] = ()
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether its choices are messages."""
        return self.kind == "chat.completion"

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """Its fields without choices and usage."""
        kind = f"{self.kind}.chunk" if chunk and self.is_chat else self.kind
        start = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{start}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def whole(
        self, results: Sequence[Result], documents: _Documents | None = None
    ) -> dict[str, Any]:
        """The whole answer; for a chat, once the replies have taken all pieces."""
        choices = []
        for index, result in enumerate(results):
            body: dict[str, Any] = {"text": result.text}
            if self.is_chat:
                body = {"message": self.replies[index].message()}
            choices.append(
                {
                    "index": index,
                    **body,
                    "logprobs": self._logprobs(index, result.token_ids, result.logprobs),
                    "finish_reason": self._reason(index, result),
                }
            )
        return {**self.head(), "choices": choices, "usage": self._usage(results, documents)}

    def take(self, index: int, piece: Piece) -> None:
        """Keeps a piece for `whole`."""
        if self.is_chat:
            self.replies[index].add(piece)

    def begin(self) -> list[dict[str, Any]]:
        """The events before the first piece of a stream: none."""
        return []

    def piece(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        """The event of a piece; none if its content is held back for the next one."""
        body: dict[str, Any] = {"text": piece.text}
        if self.is_chat:
            reply = self.replies[index]
            delta = reply.delta(reply.add(piece))
            if not (delta or first or piece.result or piece.logprobs or piece.reads):
                return []
            body = {"delta": ({"role": "assistant", "content": ""} if first else {}) | delta}
        reason = None if piece.result is None else self._reason(index, piece.result)
        logprobs = self._logprobs(index, piece.token_ids, piece.logprobs)
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
        return [{**self.head(chunk=True), "choices": [choice]}]

    def closing(
        self, results: Sequence[Result], documents: _Documents | None, *, wants_usage: bool
    ) -> list[dict[str, Any]]:
        """The event after the last piece: the usage, if it is wanted."""
        if not wants_usage:
            return []
        return [{**self.head(chunk=True), "choices": [], "usage": self._usage(results, documents)}]

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event that ends a stream with an error."""
        return error.body

    def frame(self, event: dict[str, Any]) -> bytes:
        """An object as a server-sent event."""
        return b"data: %b\n\n" % to_json(event)

    @property
    def end(self) -> bytes:
        """The last event of a stream."""
        return b"data: [DONE]\n\n"

    def _usage(self, results: Sequence[Result], documents: _Documents | None) -> dict[str, Any]:
        return usage(results, documents, n=self.n)

    def _reason(self, index: int, result: Result) -> str:
        reason = result.finish_reason
        return self.replies[index].finish_reason(reason) if self.is_chat else reason

    def _logprobs(
        self, index: int, tokens: Sequence[int], found: Sequence[dict[int, float]] | None
    ) -> dict[str, Any] | None:
        if found is None:
            return None
        tokenizer = self.tokenizer

        def text(token: int) -> str:
            return str(token) if tokenizer is None else str(tokenizer.decode([token]))

        def one(token: int, value: float) -> dict[str, Any]:
            shown = text(token)
            data = token_bytes(tokenizer, token, shown)
            return {"token": shown, "logprob": value, "bytes": list(data)}

        # JSON has no infinity; -9999 is what OpenAI's API has for a token that cannot occur.
        listed = [{token: max(value, -9999.0) for token, value in best.items()} for best in found]
        pairs = list(zip(tokens, listed, strict=False))
        if self.is_chat:
            # A chosen token that is not among the most likely is the last, beyond their number.
            most = self.top_logprobs
            return {
                "content": [
                    {
                        **one(token, best[token]),
                        "top_logprobs": [one(*x) for x in [*best.items()][:most]],
                    }
                    for token, best in pairs
                ]
            }

        def by_text(best: dict[int, float]) -> dict[str, float]:
            # Parts of characters look alike. The likeliest, which comes first, is the one to keep.
            shown: dict[str, float] = {}
            for token, value in best.items():
                shown.setdefault(text(token), value)
            return shown

        return {
            "tokens": [text(token) for token, _ in pairs],
            "token_logprobs": [best[token] for token, best in pairs],
            "top_logprobs": [by_text(best) for _, best in pairs],
            "text_offset": self.offsets[index].next([token for token, _ in pairs]),
        }


def usage(
    results: Sequence[Result], documents: _Documents | None = None, *, n: int = 1
) -> dict[str, Any]:
    """Token counts and, in `keyhole`, the counters of what was read.

    documents: the passages that were used, None without documents. n: each run of n results shares
    one prompt.
    """
    found = {} if documents is None else {"documents": documents}
    stats = [result.stats for result in results]
    prompt = sum(one.prompt_tokens for one in stats[::n])
    cached = sum(one.cached_prompt_tokens for one in stats[::n])
    generated = sum(one.generated_tokens for one in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "keyhole": counters(stats) | found,
    }


def counters(stats: Iterable[Stats]) -> dict[str, Any]:
    """The counters of all completions together; None for one that does not apply."""
    rows = [dataclasses.asdict(one) for one in stats]
    found: dict[str, Any] = {}
    for names, join in ((_ADDED, sum), (_MEAN, statistics.fmean)):
        for name in names:
            values = [row[name] for row in rows if row[name] is not None]
            found[name] = join(values) if values else None
    return found


class TokenTexts:
    """The text of each token of a growing sequence; together they are the whole text.

    A character of several tokens belongs to the last of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)

    def next(self, tokens: Sequence[int]) -> list[str]:
        """The texts of the next tokens; special tokens are shown."""
        if self._tokenizer is None:
            return [f"{token} " for token in tokens]
        if not self._tokenizer.is_fast:
            return [str(self._tokenizer.decode([token])) for token in tokens]
        backend = self._tokenizer.backend_tokenizer
        return [self._stream.step(backend, token) or "" for token in tokens]


class TextOffsets:
    """Where each token of a growing answer begins in its text, in characters."""

    def __init__(self, tokenizer: Any, *, skip_special: bool) -> None:
        self._said = Detokenizer(tokenizer, skip_special=skip_special)

    def next(self, tokens: Sequence[int]) -> list[int]:
        """The offsets of the next tokens; parts of a character begin where it does."""
        found = []
        for token in tokens:
            found.append(len(self._said.text))
            self._said.append(token)
        return found


class AnswerReads:
    """The field `keyhole` of a choice, piece by piece: the tokens that were read for each token.

    For requests with `"trace": true`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._texts = TokenTexts(tokenizer)

    def shown(self, of: Piece | Result) -> dict[str, Any]:
        """The field for a whole answer, or for a piece of a stream; the first has the prompt."""
        assert of.reads is not None
        assert of.stats is not None
        prompt, tokens = of.prompt_token_ids, of.token_ids
        first = {} if prompt is None else {"prompt": self._texts.next(prompt)}
        shown = [
            {"id": token, "text": text}
            for token, text in zip(tokens, self._texts.next(tokens), strict=True)
        ]
        for one, read in zip(shown, of.reads, strict=False):  # a very long answer has more tokens
            one |= {
                "length": read.length,
                "layers": list(read.layers),
                "ranges": [_ranges(*entry) for entry in zip(read.ranges, read.lists, strict=True)],
            }
        totals = {"counters": counters([of.stats]), "step_ms": of.stats.step_ms}
        return {**first, "tokens": shown, **totals}


def _ranges(ranges: np.ndarray, lists: int) -> list[list[float]]:
    """First token, end, and the share of KV heads if it is not all of them."""
    return [
        [start, end] if count == lists else [start, end, round(count / lists, 3)]
        for start, end, count in ranges.tolist()
    ]

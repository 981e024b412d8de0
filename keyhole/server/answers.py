"""What answers say: OpenAI's objects, with what the engine counted beside the usage."""

from __future__ import annotations

import dataclasses
import statistics
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from keyhole.engine.sequence import Piece, Result, Stats

#: What a prompt took from each of its documents.
_Documents = list[dict[str, Any]]
#: Counters of an answer, by whether those of several completions are added or averaged.
_ADDED = ("kv_bytes_read", "other_bytes_read", "moved_bytes", "store_bytes_read", "evicted_pages")
_MEAN = ("attended_fraction", "hit_rate", "offloaded_layers", "sequence_ratio", "recompute_ratio")


@dataclasses.dataclass(frozen=True)
class Answer:
    """Identity of one answer, which all of its pieces have. kind: "chat.completion" or so."""

    kind: str
    model: str
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether its choices are messages."""
        return self.kind == "chat.completion"

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """Its fields but for choices and usage."""
        kind = f"{self.kind}.chunk" if chunk and self.is_chat else self.kind
        start = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{start}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def whole(
        self, results: Sequence[Result], tokenizer: Any, documents: _Documents | None = None
    ) -> dict[str, Any]:
        """All of it at once."""
        choices = []
        for index, result in enumerate(results):
            said = {"role": "assistant", "content": result.text}
            body = {"message": said} if self.is_chat else {"text": result.text}
            choices.append(
                {
                    "index": index,
                    **body,
                    "logprobs": self._logprobs(result.token_ids, result.logprobs, tokenizer),
                    "finish_reason": result.finish_reason,
                }
            )
        return {**self.head(), "choices": choices, "usage": usage(results, documents)}

    def piece(self, index: int, piece: Piece, tokenizer: Any, *, first: bool) -> dict[str, Any]:
        """One of a stream's."""
        said = ({"role": "assistant"} if first else {}) | {"content": piece.text}
        body = {"delta": said} if self.is_chat else {"text": piece.text}
        reason = None if piece.result is None else piece.result.finish_reason
        logprobs = self._logprobs(piece.token_ids, piece.logprobs, tokenizer)
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
        return {**self.head(chunk=True), "choices": [choice]}

    def closing(
        self, results: Sequence[Result], documents: _Documents | None = None
    ) -> dict[str, Any]:
        """The piece with the usage, behind all others."""
        return {**self.head(chunk=True), "choices": [], "usage": usage(results, documents)}

    def _logprobs(
        self, tokens: Sequence[int], found: Sequence[dict[int, float]] | None, tokenizer: Any
    ) -> dict[str, Any] | None:
        if found is None:
            return None

        def text(token: int) -> str:
            return str(token) if tokenizer is None else str(tokenizer.decode([token]))

        def one(token: int, value: float) -> dict[str, Any]:
            said = text(token)
            return {"token": said, "logprob": value, "bytes": list(said.encode())}

        pairs = list(zip(tokens, found, strict=False))
        if self.is_chat:
            return {
                "content": [
                    {**one(token, best[token]), "top_logprobs": [one(*x) for x in best.items()]}
                    for token, best in pairs
                ]
            }
        return {
            "tokens": [text(token) for token, _ in pairs],
            "token_logprobs": [best[token] for token, best in pairs],
            "top_logprobs": [{text(t): value for t, value in best.items()} for _, best in pairs],
        }


def usage(results: Sequence[Result], documents: _Documents | None = None) -> dict[str, Any]:
    """Tokens, and in `keyhole` what was read for them. A prompt of several completions is one.

    documents: what they took from documents, None without any.
    """
    found = {} if documents is None else {"documents": documents}
    stats = [result.stats for result in results]
    prompts = {tuple(result.prompt_token_ids): result.stats for result in reversed(results)}
    prompt = sum(one.prompt_tokens for one in prompts.values())
    cached = sum(one.cached_prompt_tokens for one in prompts.values())
    generated = sum(one.generated_tokens for one in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "keyhole": counters(stats) | found,
    }


def counters(stats: Iterable[Stats]) -> dict[str, Any]:
    """Reads of all completions together; absent: does not apply."""
    rows = [dataclasses.asdict(one) for one in stats]
    found: dict[str, Any] = {}
    for names, join in ((_ADDED, sum), (_MEAN, statistics.fmean)):
        for name in names:
            values = [row[name] for row in rows if row[name] is not None]
            if values:
                found[name] = join(values)
    return found

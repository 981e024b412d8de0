"""The tokens read for each token of an answer, for a client that asks with `"trace": true`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from keyhole.engine.read_trace import TokenReads
from keyhole.engine.sequence import Piece, Result, Stats
from keyhole.server.answers import counters


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


class AnswerReads:
    """The field `keyhole` of a choice, piece by piece."""

    def __init__(self, tokenizer: Any) -> None:
        self._texts = TokenTexts(tokenizer)

    def piece(self, piece: Piece) -> dict[str, Any]:
        """The field for one piece of a stream; the first one has the prompt."""
        assert piece.reads is not None
        assert piece.stats is not None
        return self._shown(piece.prompt_token_ids, piece.token_ids, piece.reads, piece.stats)

    def whole(self, result: Result) -> dict[str, Any]:
        """The field for a whole answer."""
        assert result.reads is not None
        return self._shown(result.prompt_token_ids, result.token_ids, result.reads, result.stats)

    def _shown(
        self,
        prompt: Sequence[int] | None,
        tokens: Sequence[int],
        reads: Sequence[TokenReads],
        stats: Stats,
    ) -> dict[str, Any]:
        first = {} if prompt is None else {"prompt": self._texts.next(prompt)}
        shown = [
            {"id": token, "text": text}
            for token, text in zip(tokens, self._texts.next(tokens), strict=True)
        ]
        for one, read in zip(shown, reads, strict=False):  # a very long answer has more tokens
            one |= {
                "length": read.length,
                "layers": list(read.layers),
                "ranges": [_ranges(*entry) for entry in zip(read.ranges, read.lists, strict=True)],
            }
        told = {"counters": counters([stats]), "step_ms": stats.step_ms}
        return {**first, "tokens": shown, **told}


def _ranges(ranges: np.ndarray, lists: int) -> list[list[float]]:
    """First token, end, and the share of KV heads if it is not all of them."""
    return [
        [start, end] if count == lists else [start, end, round(count / lists, 3)]
        for start, end, count in ranges.tolist()
    ]

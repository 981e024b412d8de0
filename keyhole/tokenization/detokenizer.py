"""Text from tokens, as they come: whole characters only, and nothing after a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: What a tokenizer gives for bytes that do not make a character yet.
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Turns a growing list of tokens into text.

    The text of a token may depend on its neighbours (spaces, bytes of one character), so the text
    of the last few tokens is decoded again with each new one, and the difference is new. Where no
    stop text has to be found at once, tokens wait until somebody asks for the text: a step with
    many sequences then decodes nothing.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._text = ""
        self._tokens: list[int] = []
        self._context = 0  # tokens before this one no longer matter for the text
        self._done = 0  # tokens up to here are in the text
        self._given = 0  # characters handed out

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
        known = self._decode(self._tokens[self._context : self._done])
        text = self._decode(self._tokens[self._context :])
        if not final and (text.endswith(_INCOMPLETE) or len(text) <= len(known)):
            return
        start = len(self._text)
        self._text += text[len(known) :]
        self._context, self._done = self._done, len(self._tokens)
        self._cut(start)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

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

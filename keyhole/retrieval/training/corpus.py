"""Texts to train on, cut to mixed lengths; each text is given by a random generator alone."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, Protocol

from keyhole.errors import ConfigError

#: A text of fewer tokens has almost nothing outside of the window.
SHORTEST = 64
_FORMS = "a JSON string or list of token ids per line of a .jsonl file, or the whole of a .txt file"


class Corpus(Protocol):
    """Where training texts come from."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def digest(self) -> str:
        """Another one for other texts: SHA-256 in hexadecimal digits."""
        ...

    def text(self, rng: Random, length: int) -> list[int]:
        """Token ids of one text, at least SHORTEST and at most `length`; no other state."""
        ...


@dataclass(frozen=True)
class FileCorpus:
    """Texts of a file: a long one is drawn more often, and cut at any place."""

    texts: tuple[list[int], ...]
    name: str = "texts"

    @property
    def digest(self) -> str:
        """SHA-256 of the token ids: the same file read with another tokenizer is other texts."""
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        found = hashlib.sha256()
        for text in self.texts:
            found.update(json.dumps(text).encode())
        return found.hexdigest()

    def text(self, rng: Random, length: int) -> list[int]:
        """A part of a text drawn by length; one that is shorter is given whole."""
        ends = list(accumulate(map(len, self.texts)))
        text = self.texts[bisect(ends, rng.randrange(ends[-1]))]
        start = rng.randint(0, max(0, len(text) - length))
        return text[start : start + length]


def read(path: str | Path, tokenizer: Any, vocab_size: int) -> FileCorpus:
    """Reads --data; ConfigError says which line cannot be used, or that nothing is long enough.

    tokenizer: of transformers; None for a model without one, whose data must be token ids.
    """
    name = str(path)
    texts = [
        _ids(text, tokenizer, vocab_size, f"--data {name!r}{where}") for where, text in _read(name)
    ]
    long_enough = tuple(text for text in texts if len(text) >= SHORTEST)
    if not long_enough:
        longest = max(map(len, texts), default=0)
        raise ConfigError(
            f"--data {name!r} has no text of {SHORTEST} tokens or more (the longest of "
            f"{len(texts)} has {longest}); give {_FORMS}"
        )
    return FileCorpus(long_enough, f"--data {name!r}")


def _read(name: str) -> list[tuple[str, object]]:
    """Every text and where it stands."""
    try:
        content = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data {name!r} cannot be read: {error}") from error
    if not name.endswith(".jsonl"):
        return [("", content)]
    found: list[tuple[str, object]] = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append((f", line {number}", json.loads(line)))
        except ValueError as error:
            raise ConfigError(f"--data {name!r}, line {number} is no JSON: {error}") from error
    return found


def _ids(text: object, tokenizer: Any, vocab_size: int, where: str) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise ConfigError(f"{where} is text, and this model has no tokenizer; give token ids")
        # Without the warning about length: a long text is cut.
        text = tokenizer(text, verbose=False)["input_ids"]
    if not isinstance(text, list) or not all(type(token) is int for token in text):
        raise ConfigError(f"{where} must be {_FORMS}")
    wrong = [token for token in text if not 0 <= token < vocab_size]
    if wrong:
        raise ConfigError(
            f"{where} has the token id {wrong[0]}, the model knows 0 to {vocab_size - 1}"
        )
    return text

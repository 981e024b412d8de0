"""What the bundled model is forced to read where no --text is given: derivations and their results.

A window ends within what the model itself would write, so that its tokens can be known, but only
from the program before it and from results that were written earlier.
"""

from __future__ import annotations

from keyhole.config import require
from keyhole.eval.tiny_language.tasks import make
from keyhole.models.loading import Model

#: Tasks count from 0, examinations from 1,000,000, calibration from 2,000,000.
_FIRST_SEED = 3_000_000
_NUMBER = 10_000
_WORDS = range(96, 7674)
"""As short, and as long, as derivations can be."""


class TinyText:
    """Windows of a derivation each; the last ones are shorter where derivations end."""

    path = None
    digest = "derivations"

    def __init__(self, model: Model) -> None:
        self._tokenizer = model.tokenizer

    def windows(self, length: int) -> int:
        """How many there are. ConfigError for a length without room for a derivation."""
        require(length in _WORDS, "length", length, f"from {_WORDS[0]} to {_WORDS[-1]}")
        return _NUMBER

    def window(self, length: int, number: int) -> list[int]:
        """The token ids of window `number`."""
        item = make("derive", length, _FIRST_SEED + number)
        ids = self._tokenizer(f"{item.prompt} {item.answer}").input_ids
        return [int(token) for token in ids][:length]

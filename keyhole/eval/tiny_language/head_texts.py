"""Texts of the bundled model's world for its retrieval head: its training rows, freshly written."""

import hashlib
import json
from random import Random

from keyhole.eval.tiny_language.curriculum import LONGEST_WALK
from keyhole.eval.tiny_language.rows import ROWS
from keyhole.eval.tiny_language.vocabulary import WORD_IDS

_WEIGHTS = {"questions": 3.0, "walk": 1.5, "derive": 3.0}
"""What is written by the model in long generations counts most; `stream` is no task of anyone."""


class HeadTexts:
    """A corpus for `keyhole train-head` whose items are those of no evaluation.

    Every text is a prompt and an answer that takes about its second half.
    """

    name = "the bundled model's texts"
    digest = hashlib.sha256(json.dumps(_WEIGHTS).encode()).hexdigest()
    """Of the mixture; how texts are written changes with Keyhole's version only."""

    def text(self, rng: Random, length: int) -> list[int]:
        """Token ids of one row of at most `length` words, at least 96."""
        kinds = [kind for kind in _WEIGHTS if kind != "walk" or length <= LONGEST_WALK]
        kind = rng.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
        words, _ = ROWS[kind](rng, length)
        return [WORD_IDS[word] for word in words]

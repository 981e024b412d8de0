"""Retrieval from pairs of identifiers: the value of one key in a large JSON object.

Liu et al., "Lost in the Middle", TACL 2024, section 3; InfiniteBench's `kv_retrieval` is the same
with more pairs. All lines look alike, so nothing but the key itself tells which to read. Scored by
whether the value stands in the answer; 50 new tokens, as InfiniteBench allows.

Difference: the instruction is reworded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from keyhole.config import setting
from keyhole.eval.tasks.base import CountTokens, Sample, Task, require_depth
from keyhole.eval.tasks.common.filler import with_needles
from keyhole.eval.tasks.common.fitting import Written, fitted, room_for
from keyhole.eval.tasks.common.scores import string_match_all
from keyhole.eval.tasks.common.words import Stream, identifier, unique

_NEW_TOKENS = 50
_INSTRUCTION = "Look up the value of one key in this JSON object.\n\n"


@dataclass(frozen=True, kw_only=True)
class KeyValue(Task):
    """Give the value of a key."""

    depth: float | None = setting(None, "where the pair stands, from 0 to 1; None: anywhere")

    def __post_init__(self) -> None:
        require_depth(self.depth)

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the pair that is asked for is `Sample.depths`."""
        rng = self.random(length, seed)
        draw = unique(partial(identifier, rng))
        key, value = draw(), draw()
        place = rng.random() if self.depth is None else self.depth
        asked = f'"{key}": "{value}"'
        pairs = Stream(lambda: f'"{draw()}": "{draw()}"')
        new_tokens = room_for(value, count, _NEW_TOKENS)

        def write(size: int) -> Written:
            lines = with_needles(pairs.first(size), [(place, asked)])
            return Written(
                context=_INSTRUCTION + "{" + ",\n ".join(lines) + "}",
                question=f'\n\nKey: "{key}"',
                answer_prefix="\nIts value:",
                answers=(value,),
                needed=(asked,),
                new_tokens=new_tokens,
            )

        return fitted(self.name, length, seed, count, write)

    def score(self, sample: Sample, generated: str) -> float:
        """1 if the value was written, else 0."""
        return string_match_all(sample.answers, generated)


KEY_VALUE = KeyValue(name="key_value")

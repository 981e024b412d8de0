"""Prompt look-up: proposes the tokens that followed the newest ones when they occurred before.

Saxena, Prompt Lookup Decoding (2023, github.com/apoorvumang/prompt-lookup-decoding). The last n
tokens of a sequence are searched in its own earlier tokens, n from 3 down to 1; what followed their
latest occurrence is proposed. No model is needed; it pays where a text repeats parts of itself, as
in editing code, summaries and derivations.

Cost per step: one pass over the sequence's token ids.

Differences: the latest occurrence is taken, not the first. Where it overlaps the end of the
sequence, the copy goes on with the tokens that it has proposed, as in LZ77, so that a repetition
of any period yields all the tokens that are wanted.
"""

from __future__ import annotations

import numpy as np

from keyhole.engine.sequence import Sequence

#: The most tokens that must match, as in the authors' code.
MOST_MATCHED = 3


def propose(sequence: Sequence, most: int) -> list[int]:
    """At most `most` tokens to follow those of the sequence; none without an occurrence."""
    return continuation(np.frombuffer(sequence.tokens, np.int32), most)


def continuation(text: np.ndarray, most: int) -> list[int]:
    """The tokens after the latest earlier occurrence of the last ones; text: int32 [N]."""
    start = _after_match(text)
    if start is None:
        return []
    period = len(text) - start
    copied: list[int] = text[start : start + most].tolist()
    return [copied[i % period] for i in range(most)]


def _after_match(text: np.ndarray) -> int | None:
    """The place after the latest of the longest matches of the last tokens; None without one."""
    if not len(text):
        return None
    # Places behind which the last token stands, then those where the tokens before it match too.
    found = np.flatnonzero(text[:-1] == text[-1]) + 1
    for count in range(2, MOST_MATCHED + 1):
        longer = found[found >= count]
        longer = longer[text[longer - count] == text[-count]] if len(longer) else longer
        if not len(longer):
            break
        found = longer
    return int(found[-1]) if len(found) else None

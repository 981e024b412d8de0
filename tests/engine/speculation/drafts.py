"""A draft that knows what comes and errs as often as it is told, for any pattern of acceptance."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from keyhole.cache.prefix_cache import PrefixIndex
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.engine.speculation import drafting
from keyhole.engine.speculation.draft_runner import DraftRunner

#: Tokens of one step of a draft.
COUNT = 4


def pages_by_digest(index: PrefixIndex) -> dict[bytes, int]:
    """The cached pages of an index."""
    entries = index._entries
    return {entries.digest(entry): entries.pages[entry] for entry in entries.oldest_first()}


class Erring:
    """Proposes what follows in known texts; a token is wrong with a probability of `error`.

    There are from 0 to the wanted number of tokens; after a wrong one they may be right again.
    texts: more may be added later.
    """

    def __init__(self, texts: list[list[int]], vocab_size: int, error: float = 0.3) -> None:
        self._texts = texts
        self._vocab_size, self._error = vocab_size, error
        self._random = random.Random(0)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        assert most >= 1
        known = sequence.tokens.tolist()
        text = next((t for t in self._texts if t[: len(known)] == known), None)
        if text is None:
            return []
        count = most if not self._error else self._random.randint(0, most)
        return [self._maybe_wrong(token) for token in text[len(known) : len(known) + count]]

    def _maybe_wrong(self, token: int) -> int:
        if self._random.random() >= self._error:
            return token
        return (token + self._random.randint(1, self._vocab_size - 1)) % self._vocab_size


def under_draft(engine: Engine, draft: Erring) -> Engine:
    """An engine made with draft="ngram", under another draft."""
    assert engine.drafting is not None
    engine.drafting._proposer = draft.propose
    return engine


def knowing(engine: Engine, sequences: Iterable[Sequence], error: float = 0.3) -> Engine:
    """The engine under a draft that knows what these finished sequences say."""
    texts = [sequence.tokens.tolist() for sequence in sequences]
    return under_draft(engine, Erring(texts, engine.model.vocab_size, error))


def rows_of_steps(engine: Engine) -> list[int]:
    """Gets the number of proposed tokens of every step that the engine will run."""
    found: list[int] = []
    assert engine.drafting is not None
    propose = engine.drafting.propose

    def counted(plan: drafting.SchedulerOutput) -> None:
        propose(plan)
        found.append(sum(map(len, plan.drafts.values())))

    mock.patch.object(engine.drafting, "propose", counted).start()
    return found


@dataclass(eq=False)
class Replayed:
    """A draft that reads known texts, with errors, as what it proposed; it runs as ever.

    Where these say nothing, its own first token stays.

    made: what was proposed, and what the draft said in each place, by the tokens of the sequence
    then. mixed: the attention [heads, D] of each of these places.
    """

    runner: DraftRunner
    draft: Erring | None = None
    made: dict[tuple[int, ...], tuple[list[int], list[int]]] = field(default_factory=dict)
    mixed: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)

    def cut(self, sequence: Sequence) -> None:
        self.runner.cut(sequence)

    def propose(
        self, decodes: list[Sequence], wanted: Mapping[Sequence, int]
    ) -> dict[Sequence, list[int]]:
        known = {s: self.draft.propose(s, n) if self.draft else [] for s, n in wanted.items()}
        own: dict[Sequence, list[int]] = {s: [] for s in wanted}
        attention: dict[Sequence, list[Tensor]] = {s: [] for s in wanted}
        step = self.runner._draft.step

        def told(hidden: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
            tokens, features = step(hidden, mixed)
            ahead = max(map(len, own.values()))
            rows = [s for s in decodes if wanted.get(s, 0) > ahead]
            for row, (sequence, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
                own[sequence].append(token)
                attention[sequence].append(mixed[row])
                tokens[row] = dict(enumerate(known[sequence])).get(ahead, token)
            return tokens, features

        with mock.patch.object(self.runner._draft, "step", told):
            found = self.runner.propose(decodes, wanted)
        assert {s: len(tokens) for s, tokens in found.items()} == dict(wanted)
        if self.draft is not None:
            found = {s: tokens[: len(known[s]) or 1] for s, tokens in found.items()}
        made = {tuple(s.tokens): (one, own[s][: len(one)]) for s, one in found.items()}
        self.made |= made
        self.mixed |= {tuple(s.tokens): attention[s][: len(one)] for s, one in found.items()}
        return found


def replaying(engine: Engine, texts: Iterable[Sequence] = (), error: float = 0.3) -> Replayed:
    known = [sequence.tokens.tolist() for sequence in texts]
    assert engine.drafting is not None
    assert isinstance(engine.head_runner, DraftRunner)
    draft = Erring(known, engine.model.vocab_size, error) if known else None
    replayed: Any = Replayed(engine.head_runner, draft)
    engine.drafting._model = replayed
    made: Replayed = replayed
    return made

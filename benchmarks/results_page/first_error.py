"""The first wrong word of an answer, and what the step that wrote it had read.

Answers of the bundled model's tasks are sentences. A sentence of the prompt, or an earlier one of
the answer, can be copied only by a step that reads it; any other is computed from the two sentences
before it, such as the sums of derivations. Whether the answer is complete depends on the question.
The first wrong word therefore shows whether the policy withheld what the step needed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.config import EngineConfig
from keyhole.engine.engine import Engine
from keyhole.eval.policy_trace import Recorded, Trace, Traced
from keyhole.eval.tasks import Task, token_counter
from keyhole.eval.workload import request, serve
from keyhole.models.model import Model
from keyhole.policies.base import Policy

_END = "."
#: Kinds of what a word may depend on; see `FirstError`.
COPIED, COMPUTED, CLOSING = "copied", "computed", "closing"


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstError:
    """The first wrong word of an answer; words are tokens here.

    word: its number in the answer, from 0. right, written: the sentence up to it, correct and
    actual. needed: begin and end, in tokens, of what the word depends on, by kind: the last earlier
    occurrence of a copied sentence; the two sentences before a computed one; the question, for the
    end of the answer. step: the decode step that wrote the word; None if the dense prompt gave it.
    read: share of the needed tokens that the step read, mean over KV heads and over the layers that
    did not read everything; read_before: the mean of the same for the last words of earlier copied
    sentences or, for a computed one, computed sentences. None if there are none.
    """

    seed: int
    word: int
    right: str
    written: str
    needed: tuple[int, int] | None
    kind: str
    tokens_back: int | None
    step: int | None
    read: float | None
    read_before: float | None
    sparse_layers: tuple[int, ...]
    recorded: Recorded

    @property
    def marks(self) -> tuple[int, ...]:
        """Positions that the word needed."""
        return () if self.needed is None else tuple(range(*self.needed))

    def to_json(self) -> dict[str, Any]:
        """The fields stored in a line: all except the record."""
        return {name: getattr(self, name) for name in _STORED}


_STORED = (
    "seed",
    "word",
    "right",
    "written",
    "kind",
    "tokens_back",
    "step",
    "read",
    "read_before",
)


def find(
    model: Model, policy: Policy, task: Task, *, length: int, seed: int, setup: str
) -> FirstError | None:
    """Answers a sample under a policy; None if the answer is right."""
    sample = task.make(length, seed, token_counter(model.tokenizer))
    asked, traced = request(model.tokenizer, sample, setup), Traced(policy)
    served = serve(Engine(model, traced, EngineConfig(max_batch=1, prefix_cache=False)), [asked])
    encoded = model.tokenizer(sample.answers[0], add_special_tokens=False).input_ids
    answer, written = [int(token) for token in encoded], served.generated[0]
    word = first_difference(answer, written)
    if word is None:
        return None
    tokens, begin = [*asked.prompt, *asked.given, *answer], len(asked.prompt) + len(asked.given)
    (end,) = model.tokenizer(_END, add_special_tokens=False).input_ids
    stated = sources(tokens, begin, end)
    # Only the question determines where the answer ends.
    context = len(request(model.tokenizer, sample, "question").prompt)
    closing = next((n for n in range(len(answer), 0, -1) if answer[n - 1] == end), 0)
    stated[closing:] = [(context, begin)] * (len(answer) - closing)
    kinds = [COPIED if at is not None else COMPUTED for at in stated]
    kinds[closing:] = [CLOSING] * (len(answer) - closing)
    needed = [at or two_before(tokens, begin + n, end) for n, at in enumerate(stated)]
    # The first token comes from the step that reads the last given token, or from the prompt.
    steps = [len(asked.given) + number - 1 for number in range(word + 1)]
    reads = [
        share_read(traced.trace, step, at) if step >= 0 and at is not None else None
        for step, at in zip(steps, needed, strict=False)
    ]
    # The end of a sentence is what is looked up; much of the rest is grammar.
    like = COMPUTED if kinds[word] == COMPUTED else COPIED
    before = [
        share
        for number, share in enumerate(reads[:-1])
        if share is not None and kinds[number] == like and answer[number + 1] == end
    ]
    starts = max((n + 1 for n in range(word) if answer[n] == end), default=0)
    own = needed[word]
    return FirstError(
        seed=seed,
        word=word,
        right=model.tokenizer.decode(answer[starts : word + 1]),
        written=model.tokenizer.decode(written[starts : word + 1]),
        needed=own,
        kind=kinds[word],
        tokens_back=None if own is None else begin + word - own[0],
        step=steps[-1] if steps[-1] >= 0 else None,
        read=reads[-1],
        read_before=statistics.fmean(before) if before else None,
        sparse_layers=sparse_layers(traced.trace, steps[-1]) if steps[-1] >= 0 else (),
        recorded=Recorded(traced.trace, len(asked.prompt)),
    )


def first_difference(right: Sequence[int], written: Sequence[int]) -> int | None:
    """Number of the first wrong or missing token; None if all are right."""
    for number, token in enumerate(right):
        if number >= len(written) or written[number] != token:
            return number
    return None


def sources(tokens: Sequence[int], begin: int, end: int) -> list[tuple[int, int] | None]:
    """For each token from `begin` on, the last earlier occurrence of its sentence.

    end: the token that ends a sentence. An occurrence is begin and end in `tokens`, or None.
    """
    found: list[tuple[int, int] | None] = []
    start = begin
    while start < len(tokens):
        stop = next((n + 1 for n in range(start, len(tokens)) if tokens[n] == end), len(tokens))
        size = stop - start
        sentence = list(tokens[start:stop])
        earlier = (
            (at, at + size)
            for at in range(start - size, -1, -1)
            if tokens[at : at + size] == sentence
        )
        found += [next(earlier, None)] * size
        start = stop
    return found


def two_before(tokens: Sequence[int], at: int, end: int) -> tuple[int, int] | None:
    """Begin and end of the two sentences before a token's; None if there are fewer."""
    ends = [number for number in range(at) if tokens[number] == end]
    return (ends[-3] + 1, ends[-1] + 1) if len(ends) > 2 else None


def share_read(trace: Trace, step: int, place: tuple[int, int]) -> float | None:
    """Share of these tokens that a step read, mean over heads and sparse layers."""
    own = trace.steps[step]
    shares = [
        float(own.tokens(layer)[:, slice(*place)].mean()) for layer in sparse_layers(trace, step)
    ]
    return statistics.fmean(shares) if shares else None


def sparse_layers(trace: Trace, step: int) -> tuple[int, ...]:
    """The layers that did not read everything."""
    own = trace.steps[step]
    return tuple(layer for layer in trace.layers if not own.tokens(layer).all())

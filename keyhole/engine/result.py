"""What a request gives: a whole result, or pieces of a stream."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, replace

from keyhole.engine.documents.context import Reused
from keyhole.engine.sequence import Sequence, Stats

#: Characters of a text that a notebook shows of a result.
_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a request gave.

    finish_reason: "stop" (end token, stop text or id), "length" or "abort".
    logprobs: per generated token a dict token id -> log-probability, if asked for.
    reused: what an answer took from stored documents (`LLM.ask`). others: the other completions of
    the prompt, where `SamplingParams.n` asks for several.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    prompt_token_ids: list[int]
    logprobs: list[dict[int, float]] | None = None
    reused: Reused | None = None
    others: tuple[Result, ...] = ()

    def __repr__(self) -> str:
        more = f", {len(self.others)} others" if self.others else ""
        return (
            f"Result({_shortened(self.text)!r}: {len(self.token_ids)} tokens after "
            f"{len(self.prompt_token_ids)}, {self.finish_reason!r}{more})"
        )

    @property
    def completions(self) -> tuple[Result, ...]:
        """All `n` completions of the prompt, this one first."""
        return self, *self.others

    @classmethod
    def of_all(cls, completions: Several[Result]) -> Result:
        """The first of several completions of a prompt, with the others."""
        return replace(completions[0], others=tuple(completions[1:]))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one step of a stream gave; the last piece carries the whole result.

    logprobs: of these tokens, as in `Result`.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None = None
    result: Result | None = None


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def piece_of(sequence: Sequence, given: int) -> Piece | None:
    """What came of a stream behind its first `given` tokens; None: nothing yet.

    Raises what ended the request if that was an error.
    """
    done, tokens = sequence.is_finished, sequence.generated[given:]
    if not (done or tokens):
        return None
    wanted = sequence.params.logprobs is not None
    return Piece(
        text=sequence.detokenizer.take(final=done),
        token_ids=tokens,
        logprobs=sequence.logprobs[given : given + len(tokens)] if wanted else None,
        result=result_of(sequence) if done else None,
    )


def result_of(sequence: Sequence) -> Result:
    """The result of a finished sequence; raises its error if it has one."""
    if sequence.error is not None:
        raise sequence.error
    assert sequence.finish_reason is not None
    return Result(
        text=sequence.detokenizer.text,
        token_ids=sequence.generated,
        finish_reason=sequence.finish_reason,
        stats=sequence.stats(),
        prompt_token_ids=list(sequence.prompt),
        logprobs=sequence.logprobs if sequence.params.logprobs is not None else None,
        reused=sequence.reused,
    )

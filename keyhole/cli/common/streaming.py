"""Runs one request and shows it as it comes; Ctrl-C ends the request, and keeps what there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from keyhole.cli.common.interrupt import Interrupt
from keyhole.engine.sequence import Piece, Result, piece_of

if TYPE_CHECKING:
    from keyhole.engine.sequence import Sequence
    from keyhole.llm import LLM


def answer(llm: LLM, sequence: Sequence, *, silent: bool = False) -> Result:
    """The result of a request that was submitted, printed as it comes unless `silent`.

    After Ctrl-C its finish_reason is "abort". Raises what ended the request if that was an error.
    """
    result = None
    for piece in _pieces(llm, sequence):
        if not silent:
            print(piece.text, end="", flush=True)
        result = piece.result
    assert result is not None
    if not silent:
        print()
    return result


def abort(llm: LLM, sequences: Iterable[Sequence]) -> None:
    """Ends requests; what they have stays."""
    for sequence in sequences:
        llm.engine.abort(sequence)


def _pieces(llm: LLM, sequence: Sequence) -> Iterator[Piece]:
    """The pieces of a request, the result in the last; a bar tells how far its prompt is."""
    given, total = 0, len(sequence.prompt)
    bar = tqdm(total=total, desc="prompt", unit="token", leave=False, delay=1, disable=None)
    with Interrupt() as interrupt, bar:
        try:
            while True:
                if interrupt.seen:
                    llm.engine.abort(sequence)
                elif not sequence.is_finished and len(sequence.generated) == given:
                    llm.engine.step()  # other requests of the batch have steps of their own
                piece = piece_of(sequence, given)
                if piece is None:
                    bar.update(min(sequence.num_computed, total) - bar.n)
                    continue
                bar.close()
                given += len(piece.token_ids)
                yield piece
                if piece.result is not None:
                    return
        finally:
            llm.engine.abort(sequence)

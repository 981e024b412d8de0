"""Samples the next token of many sequences at once, each with its own settings.

The order is that of vLLM and transformers: grammar, logit bias, repetition penalty, presence and
frequency penalty, bad words; then temperature, top-k, top-p, min-p. A sequence draws one number
per token from its own generator, so its tokens do not depend on its neighbours. Nothing waits for
a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Several

import numpy as np
import torch
from torch import Tensor

from keyhole.engine.sequence import Sequence
from keyhole.grammar import GrammarState, allowed

#: Tokens of a row, and what is added to their scores.
_Change = tuple[int, Several[int], Several[float]]

#: Parts of a row, at most, whose largest scores a GPU seeks in parallel.
_PARTS = 256


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score of each row and its first place, [B] each; NaN is the largest.

    A GPU reduces parts of a row in parallel, and then their results: a row is one program to torch.
    """
    num_rows, width = logits.shape
    parts = _parts(logits)
    largest, place = logits.reshape(num_rows, parts, -1).max(-1)
    largest, part = largest.max(-1)
    return largest, place.gather(1, part[:, None])[:, 0] + part * (width // parts)


def _parts(logits: Tensor) -> int:
    return math.gcd(logits.shape[1], _PARTS) if logits.is_cuda else 1


def sample(logits: Tensor, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """The next token of each sequence, int64 [B], and the largest score of each row.

    A token is -1 where every one is excluded. logits: [B, vocabulary], of any float dtype. The
    largest score is taken before biases, penalties and filters are applied.
    """
    largest, first = best(logits)
    bound = [(i, s.grammar) for i, s in enumerate(sequences) if s.grammar is not None]
    changed = [(i, s) for i, s in enumerate(sequences) if s.changes_scores]
    drawing = [i for i, s in enumerate(sequences) if s.params.temperature]
    if bound:
        logits = _constrain(logits.float(), bound)
    if not bound and not changed and not drawing:
        return first, largest
    logits = _change(logits.float(), changed) if changed else logits.float()
    tokens = logits.argmax(-1)
    if drawing:
        rows = _send(drawing, logits)
        tokens[rows] = _draw(logits[rows], [sequences[i] for i in drawing])
    if bound or changed:
        tokens = tokens.masked_fill(logits.amax(-1) == float("-inf"), -1)
    return tokens, largest


def top_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Token ids and log-probabilities [B, k + 1] of the k best and of the chosen token (last).

    Of the model's own distribution: before penalty, temperature and filters.
    """
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(k, logits.shape[-1]), dim=-1)
    chosen = tokens.clamp(min=0)[:, None]
    return torch.cat([ids, chosen], 1), torch.cat([values, logprobs.gather(1, chosen)], 1)


def _constrain(logits: Tensor, rows: list[tuple[int, GrammarState]]) -> Tensor:
    """Scores of -inf for tokens that a grammar does not allow; a new tensor."""
    masks = allowed([state for _, state in rows])
    words = _send(masks, logits, torch.int32)
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    banned = bits.flatten(1)[:, : logits.shape[-1]] == 0
    places = _send([row for row, _ in rows], logits)
    return logits.index_copy(0, places, logits[places].masked_fill(banned, float("-inf")))


def _change(logits: Tensor, rows: list[tuple[int, Sequence]]) -> Tensor:
    """Scores after bias, penalties and bad words; a new tensor."""
    biases = [(i, s.params.logit_bias or {}) for i, s in rows]
    logits = _add(logits, [(i, [*bias], [*bias.values()]) for i, bias in biases if bias])
    logits = _penalise(logits, rows)
    logits = _add(logits, (_repeated(i, s) for i, s in rows))
    return _add(logits, (_banned(i, s) for i, s in rows))


def _add(logits: Tensor, changes: Iterable[_Change]) -> Tensor:
    """Scores with amounts added to tokens; a token may be listed twice."""
    rows: list[int] = []
    ids: list[int] = []
    amounts: list[float] = []
    for row, tokens, added in changes:
        rows += [row] * len(tokens)
        ids += tokens
        amounts += added
    if not ids:
        return logits
    places = (_send(rows, logits), _send(ids, logits))
    return logits.index_put(places, _send(amounts, logits, logits.dtype), accumulate=True)


def _penalise(logits: Tensor, rows: list[tuple[int, Sequence]]) -> Tensor:
    """Divides positive and multiplies negative logits of tokens that a sequence has seen."""
    seen = [
        (i, np.unique(s.tokens), s.params.repetition_penalty)
        for i, s in rows
        if s.params.repetition_penalty != 1.0
    ]
    if not seen:
        return logits
    place = np.concatenate([np.full(len(ids), i) for i, ids, _ in seen])
    amount = np.concatenate([np.full(len(ids), penalty, np.float64) for _, ids, penalty in seen])
    places = (_send(place, logits), _send(np.concatenate([ids for _, ids, _ in seen]), logits))
    found, penalty = logits[places], _send(amount, logits, logits.dtype)
    return logits.index_put(places, torch.where(found > 0, found / penalty, found * penalty))


def _repeated(row: int, sequence: Sequence) -> _Change:
    """The presence and frequency penalties (OpenAI's) of generated tokens, as negative amounts."""
    params = sequence.params
    if not (params.presence_penalty or params.frequency_penalty):
        return row, [], []
    ids, counts = np.unique(np.array(sequence.generated, dtype=np.int64), return_counts=True)
    amounts = -params.presence_penalty - params.frequency_penalty * counts
    return row, ids.tolist(), amounts.tolist()


def _banned(row: int, sequence: Sequence) -> _Change:
    """The tokens that would complete a bad word, or end the sequence too early."""
    early = sequence.num_generated - len(sequence.given) < sequence.params.min_tokens
    tokens, last = sequence.tokens, set(sequence.end_ids if early else ())
    for *before, end in sequence.bad_ids:
        if not before or tokens[-len(before) :].tolist() == before:
            last.add(end)
    return row, [*last], [float("-inf")] * len(last)


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Inverse-transform sampling over the sorted, filtered distribution."""
    temperature = _column(sequences, "temperature", logits)
    # Infinite, it would make NaN of the scores of tokens that are excluded.
    limits = torch.finfo(logits.dtype)
    temperature = temperature.clamp(limits.tiny, limits.max)
    # The largest becomes 0, so that a tiny temperature makes none infinite.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    logits, order = logits.sort(-1, descending=True)
    top_k = _column(sequences, "top_k", logits)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    logits = logits.masked_fill((top_k > 0) & (rank >= top_k), float("-inf"))
    weights = logits.softmax(-1)
    before = weights.cumsum(-1) - weights
    beyond = (before >= _column(sequences, "top_p", logits)) & (rank > 0)
    weights = weights.masked_fill(beyond, 0.0)
    least = weights[:, :1] * _column(sequences, "min_p", logits)
    total = weights.masked_fill(weights < least, 0.0).cumsum(-1)
    number = _send([s.random.random() for s in sequences], total, total.dtype)
    place = torch.searchsorted(total, number[:, None] * total[:, -1:], right=True)
    # One number in 2^25 is rounded to 1, which is beyond every token.
    last = (total < total[:, -1:]).sum(-1, keepdim=True)
    return order.gather(1, place.minimum(last))[:, 0]


def _column(sequences: list[Sequence], name: str, like: Tensor) -> Tensor:
    return _send([getattr(s.params, name) for s in sequences], like, like.dtype)[:, None]


def _send(values: object, like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copies numbers to the device of a tensor without waiting for the copy."""
    host = torch.as_tensor(values, dtype=dtype)
    if like.device.type == "cuda":
        host = host.pin_memory()
    return host.to(like.device, non_blocking=True)

"""Chooses the next token of many sequences at once, each with its own settings.

The order is transformers' own: repetition penalty, temperature, top-k, top-p, min-p. A sequence
draws one number per token from its own generator, so its tokens do not depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.engine.sequence import Sequence


def sample(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """The next token of each sequence, int64 [B]; logits [B, vocabulary] of any float dtype."""
    if all(s.params.temperature == 0 and s.params.repetition_penalty == 1.0 for s in sequences):
        return logits.argmax(-1)
    logits = _penalise(logits.float(), sequences)
    tokens = logits.argmax(-1)
    drawing = [i for i, s in enumerate(sequences) if s.params.temperature]
    if drawing:
        rows = torch.tensor(drawing, device=logits.device)
        tokens[rows] = _draw(logits[rows], [sequences[i] for i in drawing])
    return tokens


def top_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Token ids and log-probabilities [B, k + 1] of the k best and of the chosen token (last).

    Of the model's own distribution: before penalty, temperature and filters.
    """
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(k, logits.shape[-1]), dim=-1)
    chosen = tokens[:, None]
    return torch.cat([ids, chosen], 1), torch.cat([values, logprobs.gather(1, chosen)], 1)


def _penalise(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Divides positive and multiplies negative logits of tokens that a sequence has seen."""
    if all(s.params.repetition_penalty == 1.0 for s in sequences):
        return logits
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, sequence in zip(seen, sequences, strict=True):
        if sequence.params.repetition_penalty != 1.0:
            row[torch.tensor(sequence.tokens)] = True
    penalty = _column(sequences, "repetition_penalty", logits)
    changed = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen.to(logits.device), changed, logits)


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Inverse-transform sampling over the sorted, filtered distribution."""
    logits, order = (logits / _column(sequences, "temperature", logits)).sort(-1, descending=True)
    top_k = _column(sequences, "top_k", logits)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    logits = logits.masked_fill((top_k > 0) & (rank >= top_k), float("-inf"))
    weights = logits.softmax(-1)
    before = weights.cumsum(-1) - weights
    weights = weights.masked_fill(before >= _column(sequences, "top_p", logits), 0.0)
    least = weights[:, :1] * _column(sequences, "min_p", logits)
    total = weights.masked_fill(weights < least, 0.0).cumsum(-1)
    number = torch.tensor([s.random.random() for s in sequences], dtype=total.dtype)
    place = torch.searchsorted(total, number[:, None].to(total.device) * total[:, -1:], right=True)
    return order.gather(1, place.clamp(max=total.shape[-1] - 1))[:, 0]


def _column(sequences: list[Sequence], name: str, like: Tensor) -> Tensor:
    values = [getattr(s.params, name) for s in sequences]
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]

"""Trains a head on its target's attention: the KL divergence between their weights.

For a query token r and a KV head g the target's mass p[g, r, i] over tokens i is the mean of its
attention weights over full-attention layers and over the query heads of g; the head's own is the
mean of its query heads that serve g. Tokens that every selection includes (first tokens and a
recent window) are removed from both, and the rest is renormalised, so that no capacity is spent on
them. Each row is weighted by its remaining mass.

Ours; SpeContext takes its head from a draft model (see `draft`). No language-model part is needed:
the loss reads nothing but queries and keys.

Masking is done after the head's softmax over all tokens, not before: the selection compares weights
of different query heads, and these are normalised over all tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training.recall import NOTHING, log_weights
from keyhole.retrieval.training.teacher import TeacherTargets

#: First and newest tokens that are left out: the sinks and the window of SpeContext. Otherwise most
#: of the loss is about neighbours: of 24 derivations of the bundled model at an eighth of their
#: length, 1 was right with a head trained so, 12 with this one (a quick run of 1.1 M tokens each).
FIRST, LAST = 4, 64


def attention_loss(head: RetrievalHead, lesson: TeacherTargets) -> tuple[Tensor, Tensor]:
    """The loss, a scalar in nats, and the log of the head's weights [heads, R, n]."""
    logs = log_weights(head, lesson)
    return mass_divergence(logs, lesson), logs


def mass_divergence(
    logs: Tensor, lesson: TeacherTargets, *, first: int = FIRST, last: int = LAST
) -> Tensor:
    """The loss of logs of weights [heads, R, n], a scalar in nats.

    The mean KL divergence over rows and KV heads, weighted by the mass outside of the `first` and
    `last` tokens; 0 where there is none.
    """
    mass, rows = lesson.mass, lesson.rows
    groups, length = len(mass), mass.shape[-1]
    lists = min(groups, len(logs))
    predicted = logs.unflatten(0, (lists, -1))
    predicted = predicted.logsumexp(1) - math.log(predicted.shape[1])
    predicted = predicted.repeat_interleave(groups // lists, 0)

    places = torch.arange(length, device=rows.device)
    out = (places < first) | (places > (rows - last)[:, None])
    predicted = predicted.masked_fill(out, NOTHING).log_softmax(-1)
    wanted = mass.masked_fill(out, 0)
    left = wanted.sum(-1, keepdim=True)  # [groups, R, 1]
    # sum_i p_i log(p_i / left / q_i): the KL divergence times `left`, without dividing by zero.
    entropy = torch.xlogy(wanted, wanted).sum() - torch.xlogy(left, left).sum()
    loss: Tensor = entropy - (wanted * predicted).sum()
    return loss / left.sum().clamp_min(1e-9)
